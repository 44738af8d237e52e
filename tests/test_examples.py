"""Every example runs in its short form, in a new folder."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
#: What each example prints.
PRINTS = {
    "own_cnn.py": "first image shows direction",
    "text.py": "parameters are sent\naccuracy",
    "regression.py": "metric rmse: ",
    "own_method.py": "all add up",
    "trace_fleet.py": "trips lost because a device left",
    "lora.py": "parameters are sent instead of",
    "flower_app.py": "start it with: flwr run",
    "adapter.py": "1,123 of 42,278 parameters are sent",
    "language_model.py": "perplexity 96.3 -> ",
    "own_loop.py": "fedavg: accuracy",
    "two_optimisers.py": "fedavg: accuracy",
    "lightning_module.py": "fedavg: accuracy",
    "transformers_trainer.py": "fedavg: accuracy",
    "flower_client.py": "fedavg: accuracy",
    "classifier.py": "fedavg: accuracy",
    "vit.py": "fedavg: accuracy",
    "gpt_lora.py": "fedavg: 2,944 numbers are sent, perplexity",
    "data_loader.py": "fedavg: accuracy",
}
NEEDS = {
    "flower_app.py": "flwr",
    "flower_client.py": "flwr",
    "adapter.py": "peft",
    "language_model.py": "transformers",
    "lightning_module.py": "lightning",
    "transformers_trainer.py": "transformers",
    "classifier.py": "transformers",
    "vit.py": "transformers",
    "gpt_lora.py": "peft",
}


def run(arguments: list[str], folder: Path) -> str:
    path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "FRESHET_SHORT": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS)
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["figure.ipynb"]


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    assert PRINTS[name] in run([str(EXAMPLES / name)], tmp_path)


#: Training as people bring it. Each file has a function ``federation(method)``, which ``freshet deploy`` takes, too.
BROUGHT = (
    "classifier.py",
    "gpt_lora.py",
    "vit.py",
    "data_loader.py",
    "lightning_module.py",
    "transformers_trainer.py",
    "flower_client.py",
    "own_loop.py",
    "two_optimisers.py",
)
#: Functions that invent data.
INVENTING = ("sentences", "counting", "sequences")


@pytest.mark.parametrize("name", BROUGHT)
def test_what_people_bring_takes_at_most_25_lines(name: str) -> None:
    code = ast.parse((EXAMPLES / name).read_text()).body
    kept = [node for node in code if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in INVENTING]
    lines = [line for node in kept for line in ast.unparse(node).splitlines() if line.strip()]
    assert "federation" in [node.name for node in kept] and len(lines) <= 25


@pytest.mark.parametrize("name", ["classifier", "gpt_lora", "vit", "data_loader"])
def test_what_people_bring_trains_alike_in_two_workers(name: str, tmp_path: Path) -> None:
    if (package := NEEDS.get(f"{name}.py")) and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    compare = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"from {name} import federation\n"
        "kinds = ({'run.executor': kind, 'run.workers': 2} for kind in ('serial', 'processes'))\n"
        "made = federation('fedasmu')\n"
        "runs = [made.with_settings(kind).run(40, out=kind['run.executor']) for kind in kinds]\n"
        "print(runs[0].summary['uploads'] > 3, runs[0].weights.tobytes() == runs[1].weights.tobytes())\n"
    )
    (tmp_path / "compare.py").write_text(compare)
    assert run(["compare.py"], tmp_path) == "True True\n"


def test_the_flower_app_can_be_loaded(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    run([str(EXAMPLES / "flower_app.py"), "app"], tmp_path)
    look = "from freshet_app import client_app, server_app; print(type(client_app.app), type(server_app.app))"
    assert run(["-c", look], tmp_path / "app").count("App'>") == 2


def test_the_own_method_fits_on_a_screen_and_runs_from_the_command_line(tmp_path: Path) -> None:
    words = ["-m", "freshet", "run", "-m", f"{EXAMPLES / 'own_method.py'}:Bounded", "--until", "20", "-q"]
    folder = run([*words, "-o", "made", "--executor", "serial"], tmp_path).strip()
    assert "all add up" not in folder and (tmp_path / folder / "summary.json").is_file()
    body = (EXAMPLES / "own_method.py").read_text().split("class Bounded(Method)")[1].split("if __name__")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40


def test_the_notebook_runs_and_is_stored_without_outputs(tmp_path: Path, monkeypatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "figure.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    monkeypatch.setenv("FRESHET_SHORT", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    client.NotebookClient(
        notebook, timeout=200, startup_timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [
        output.data
        for cell in cells
        for output in cell.outputs
        if output.output_type in ("display_data", "execute_result")
    ]
    assert any("image/png" in data for data in shown)
