"""The files around the code agree with it: package, workflows, hooks, recipe, containers, chart. No network."""

import contextlib
import re
import runpy
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from freshet import __version__
from freshet.cli.app import app
from freshet.config import SECTIONS
from freshet.flower.folder import ServerFile

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github" / "actions").glob("*/action.yml"))
YAML = [
    *(ROOT / ".github").rglob("*.yml"),
    *(ROOT / "deploy").glob("*.yaml"),
    *(ROOT / "deploy" / "chart").glob("*.yaml"),
    ROOT / "conda" / "recipe.yaml",
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".yamllint.yaml",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUILD = runpy.run_path(str(ROOT / "hatch_build.py"))
RELEASE = runpy.run_path(str(ROOT / "scripts" / "check_release.py"))
ADDRESS = "https://forge.example/owner/name"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", YAML, ids=name)
def test_yaml_parses_to_a_table(path: Path) -> None:
    assert isinstance(load(path), dict)


# ---- workflows


def steps(path: Path) -> Iterator[dict[str, Any]]:
    document = load(path)
    for job in document["jobs"].values() if "jobs" in document else [document["runs"]]:
        yield from job["steps"]


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=name)
def test_steps_call_targets_and_scripts_that_exist(path: Path) -> None:
    lines = "\n".join(step["run"] for step in steps(path) if "run" in step)
    for target in re.findall(r"\bmake (\S+)", lines):
        known = target.replace(".venv/bin", "$(BIN)")
        assert re.search(rf"^{re.escape(known)}:", MAKEFILE, re.MULTILINE), f"there is no target {target}"
    for script in re.findall(r"\bscripts/\S+", lines):
        assert (ROOT / script).is_file(), script


def test_the_workflows_run_every_check_that_contributing_names() -> None:
    named = set(re.findall(r"^\| `make (\S+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)) - {"format"}
    commands = "\n".join(step.get("run", "") for path in WORKFLOWS for step in steps(path))
    assert len(named) >= 7 and named <= set(re.findall(r"^make (\S+)$", commands, re.MULTILINE))


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=name)
def test_foreign_actions_are_pinned_by_commit(path: Path) -> None:
    for step in steps(path):
        match step.get("uses"):
            case str(local) if local.startswith("./"):
                assert (ROOT / local / "action.yml").is_file()
            case str(foreign):
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", foreign), foreign


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_a_workflow_may_read_and_keeps_no_credentials(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {"contents": "read"} and "concurrency" in document
    checkouts = [step for step in steps(path) if "actions/checkout@" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_only_publishing_jobs_may_do_more_than_read() -> None:
    more = {
        (path.stem, key): job["permissions"]
        for path in WORKFLOWS
        for key, job in load(path)["jobs"].items()
        if "permissions" in job
    }
    assert more == {
        ("docs", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "publish"): {"id-token": "write"},
    }


def test_what_is_published_was_built_once_and_installed() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert (jobs["install"]["needs"], jobs["publish"]["needs"]) == ("build", "install")
    assert jobs["publish"]["environment"] == "pypi" and "tag" in jobs["publish"]["if"]
    assert not any("run" in step for step in jobs["publish"]["steps"])


def test_the_tests_run_on_every_python_that_is_claimed() -> None:
    claimed = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    matrix = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == claimed
    assert {include["system"].partition("-")[0] for include in matrix["include"]} == {"macos"}


def test_hooks_are_local_and_use_the_environment() -> None:
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        program, *rest = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/") and hook["language"] == "system"
        assert all((ROOT / word).exists() for word in rest if "/" in word)


# ---- the package


def relative_targets(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)]+)\)", prose) if not re.match(r"[a-z]+:|#", target)]


@pytest.mark.parametrize("repository", ["", ADDRESS])
def test_the_readme_of_the_package_has_no_relative_links(repository: str) -> None:
    assert relative_targets(README)
    assert relative_targets(BUILD["package_readme"](README, repository, "v1")) == []


def test_links_of_the_package_lead_to_the_release() -> None:
    text = "[a](docs/a.md#b) ![c](d.png) [e](https://f.example) [g](#h)\n```\n[x](y)\n```\n"
    assert BUILD["package_readme"](text, ADDRESS, BUILD["git_ref"]("1.2.0")) == (
        f"[a]({ADDRESS}/blob/v1.2.0/docs/a.md#b) ![c]({ADDRESS}/raw/v1.2.0/d.png) [e](https://f.example) [g](#h)\n"
        "```\n[x](y)\n```\n"
    )
    assert BUILD["git_ref"]("1.3.0.dev0") == "HEAD"


def test_without_an_address_links_are_words_and_pictures_are_left_out() -> None:
    text = "![c](d.png)\n\n[a](docs/a.md) [e](https://f.example)\n"
    assert BUILD["package_readme"](text, "", "v1") == "\n\na [e](https://f.example)\n"
    assert BUILD["project_urls"]("", "v1") == {}
    assert BUILD["project_urls"](ADDRESS, "v1")["Changelog"] == f"{ADDRESS}/blob/v1/CHANGELOG.md"


def test_the_repository_has_one_address() -> None:
    address = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    files = [(ROOT / "CITATION.cff").read_text(), (ROOT / "mkdocs.yml").read_text()]
    named = re.findall(r"^(?:repository-code|repo_url): (\S+)$", "\n".join(files), re.MULTILINE)
    assert set(named) <= {address}


def test_the_sdist_leaves_out_results_and_pictures() -> None:
    left_out = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"]
    assert {"/results", "/docs/images"} <= set(left_out)
    assert all((ROOT / path.strip("/")).is_dir() for path in left_out)


def release_files(folder: Path, **changed: str) -> Path:
    files = {
        "src/freshet/_version.py": '__version__ = "1.0.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.0.0 (2030-01-31)\n",
        "CITATION.cff": "title: Freshet\nversion: 1.0.0\nlicense: x\n",
        "pyproject.toml": f'[tool.hatch.metadata.hooks.custom]\nrepository = "{ADDRESS}"\n',
    }
    for path, text in (files | changed).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_a_release_whose_files_agree_is_ready(tmp_path: Path) -> None:
    assert list(RELEASE["problems"]("v1.0.0", ADDRESS, release_files(tmp_path))) == []


@pytest.mark.parametrize(
    ("tag", "address", "changed", "said"),
    [
        ("v1.0.1", ADDRESS, {}, "the tag v1.0.1 is not v1.0.0"),
        ("v1.0.0", f"{ADDRESS}2", {}, "repository in pyproject.toml"),
        ("v1.0.0", ADDRESS, {"CHANGELOG.md": "## 1.0.0 (unreleased)\n"}, "no dated section for 1.0.0"),
        ("v1.0.0", ADDRESS, {"CITATION.cff": "title: x\nversion: 0.9.0\n"}, "CITATION.cff does not name"),
    ],
)
def test_a_release_whose_files_disagree_is_refused(tmp_path: Path, tag, address, changed, said) -> None:
    (problem,) = RELEASE["problems"](tag, address, release_files(tmp_path, **changed))
    assert said in problem


def test_the_conda_recipe_has_the_version_and_the_dependencies_of_the_package() -> None:
    recipe = load(ROOT / "conda" / "recipe.yaml")
    renamed = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    wanted = {renamed.get(n, n) + bound for n, bound in (line.split() for line in recipe["requirements"]["run"])}
    wanted.remove(f"python{PROJECT['project']['requires-python']}")
    assert wanted == set(PROJECT["project"]["dependencies"])
    assert recipe["context"]["version"] == __version__


# ---- containers


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a freshet command as its program does."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return command.make_context(command.name, list(words)).params


def defaults(text: str, **given: str) -> str:
    """Replace ``${NAME:-default}`` and ``${NAME}``."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*))?[^}]*\}", lambda m: given.get(m[1], m[2] or ""), text)


def test_the_services_run_commands_that_exist() -> None:
    server = load(ROOT / "deploy" / "compose.yaml")["services"]
    init = parse([defaults(word) for word in server["init"]["command"]])
    assert (init["host"], init["devices"], init["method"]) == (("server",), 4, "fedasmu")
    assert parse(server["server"]["command"])["directory"] == init["directory"] == "/federation"
    device = load(ROOT / "deploy" / "device.yaml")["services"]["device"]
    given = parse([defaults(word, NODE="3") for word in device["command"]])
    assert (given["node"], given["directory"]) == (3, "/federation")


def test_the_server_publishes_its_two_ports() -> None:
    ports = [ServerFile().port, ServerFile().fresh_port]
    assert load(ROOT / "deploy" / "compose.yaml")["services"]["server"]["ports"] == [f"{p}:{p}" for p in ports]
    assert f"EXPOSE {ports[0]} {ports[1]}\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    for part in ("job", "service"):
        text = (ROOT / "deploy" / "chart" / "templates" / f"{part}.yaml").read_text()
        assert [int(port) for port in re.findall(r"(?:containerPort|port): (\d+)", text)] == ports


def test_a_device_sees_three_files_read_only_and_its_own_memory() -> None:
    (device,) = load(ROOT / "deploy" / "device.yaml")["services"].values()
    *files, memory = device["volumes"]
    assert all(each["read_only"] for each in files) and memory == "memory:/federation/memory"
    assert [defaults(each["target"], NODE="3") for each in files] == [
        "/federation/certificates/ca.crt",
        "/federation/keys/node_3",
        "/federation/device.toml",
    ]


def test_no_container_runs_as_root() -> None:
    user = "10001:10001"
    assert f"\nUSER {user}\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    services = [*load(ROOT / "deploy" / "compose.yaml")["services"].values()]
    services += load(ROOT / "deploy" / "device.yaml")["services"].values()
    assert {(each["user"], *each["cap_drop"]) for each in services} == {(user, "ALL")}
    assert "runAsNonRoot: true" in (ROOT / "deploy" / "chart" / "templates" / "job.yaml").read_text()


def test_the_image_is_made_of_files_that_exist_and_are_sent() -> None:
    sent = set((ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines())
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert "src" in sources and all((ROOT / each).exists() and f"!{each}" in sent for each in sources)


def test_the_chart_starts_the_server_with_settings_that_exist() -> None:
    values = load(ROOT / "deploy" / "chart" / "values.yaml")
    template = (ROOT / "deploy" / "chart" / "templates" / "job.yaml").read_text()
    (block,) = re.findall(r"args:\n((?:\s+(?:- |\{\{).*\n)+)", template)
    words = re.findall(r"^\s+- (.*)$", block, re.MULTILINE)
    known = {".Values.devices": values["devices"], ".Values.method": values["method"], ".": values["settings"][0]}
    given = parse([re.sub(r"\{\{ (.*) \}\}", lambda m: str(known.get(m[1], "host")), word) for word in words])
    assert (given["host"], given["devices"], given["method"]) == (("host",), 4, "fedasmu")
    for setting in given["settings"]:
        section, _, key = setting.partition("=")[0].partition(".")
        assert key in SECTIONS[section].model_fields


# ---- the health check


def healthy(folder: Path, **variables: str) -> bool:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "health.py"], env={"FRESHET_FOLDER": str(folder)} | variables, check=False
    )
    return done.returncode == 0


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A deployment's certificates, and a bound socket whose port its settings name."""
    security = pytest.importorskip("freshet.flower.security", reason="needs the extra flower")
    (tmp_path / "certificates").mkdir()
    security.make_authority(tmp_path / "certificates")
    security.make_server(tmp_path / "certificates", ["localhost", "127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (tmp_path / "server.toml").write_text(f"[server]\nport = {port}\n")
        (tmp_path / "device.toml").write_text(f"[device]\nport = {port}\n")
        yield tmp_path, listener


def serve_once(listener: socket.socket, certificates: Path) -> threading.Thread:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")

    def answer() -> None:
        with contextlib.suppress(OSError):  # the caller refused the certificate
            context.wrap_socket(listener.accept()[0], server_side=True).close()

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_server_is_healthy_if_it_has_a_certificate_of_its_authority(deployment, tmp_path_factory) -> None:
    from freshet.flower import security

    folder, listener = deployment
    thread = serve_once(listener, folder / "certificates")
    assert healthy(folder)
    thread.join()
    stranger = tmp_path_factory.mktemp("stranger")
    security.make_authority(stranger)
    security.make_server(stranger, ["localhost", "127.0.0.1"])
    thread = serve_once(listener, stranger)
    assert not healthy(folder)
    thread.join()


def test_a_device_is_healthy_while_its_port_answers(deployment) -> None:
    folder, listener = deployment
    assert healthy(folder, FRESHET_NODE="0")
    listener.close()
    assert not healthy(folder, FRESHET_NODE="0")


def test_a_folder_without_a_deployment_is_not_healthy(tmp_path: Path) -> None:
    assert not healthy(tmp_path)
