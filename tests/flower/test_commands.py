"""The Flower commands of a deployment: their words, the access control of the SuperLink, and file modes of secrets."""

import re
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.config import load_tables, resolve
from freshet.errors import ConfigError, FreshetError, RunError
from freshet.flower import commands, running
from freshet.flower.commands import Command
from freshet.flower.folder import Folder, init
from freshet.flower.running import free_ports
from freshet.runs.summary import remarks

TABLES = {"method": {"name": "fedasmu"}, "fleet": {"devices": 2}, "run": {"until": 60.0}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return init(tmp_path_factory.mktemp("d"), TABLES, ["fl.example.org", "10.0.0.7"])


def test_commands_use_tls_and_keys_and_contain_no_secret(made: Folder) -> None:
    link, executor = map(str, commands.superlink(made))
    node, run = str(commands.supernode(made, 1, "mydata:load")), str(commands.run(made))
    assert "--enable-supernode-auth" in link and "--insecure" not in link + executor + node + run
    assert "--ssl-keyfile" in link and "--root-certificates" in executor and "--auth-supernode-private-key" in node
    assert 'data="mydata:load"' in node and "partition-id=1" in node
    assert link.count("--superexec-auth-secret-file") == executor.count("--superexec-auth-secret-file") == 1
    secret = made.key(1).read_text().splitlines()[1]
    assert all(secret not in command for command in (link, executor, node, run))


def test_supernode_gives_tasks_only_to_who_knows_its_secret(made: Folder) -> None:
    commands.make_task_secrets(made, [0, 1])
    before = commands.task_secret(made, 1).read_bytes()
    commands.make_task_secrets(made, [0, 1])
    assert commands.task_secret(made, 1).read_bytes() == before != commands.task_secret(made, 0).read_bytes()
    assert len(before) == 64 and commands.task_secret(made, 1).stat().st_mode & 0o777 == 0o600
    node, executor = commands.supernode(made, 1), commands.shared_executor(made, [0, 1])
    assert f"--isolation process --superexec-auth-secret-file {commands.task_secret(made, 1)}" in str(node)
    assert f"19101={commands.task_secret(made, 1)}" in executor.words and before.decode() not in str(executor)


@pytest.mark.parametrize(
    ("nodes", "cores", "wanted", "trainers", "threads"),
    [(1, 8, "", 1, 8), (8, 2, "", 2, 1), (3, 8, "", 3, 2), (8, 8, "2", 8, 2)],
)
def test_devices_share_the_cores(
    made: Folder,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    cores: int,
    wanted: str,
    trainers: int,
    threads: int,
) -> None:
    """At most one trip per core, and together no more threads than cores unless they are asked for."""
    monkeypatch.setattr(commands.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    words = commands.shared_executor(made, range(nodes)).words
    assert words[words.index("executor") + 1 :][:2] == [str(trainers), str(threads)]
    assert len(words) == words.index("executor") + 3 + nodes


def test_deployed_processes_compile_modules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in commands.full_environment(Command("x", []))


def test_several_devices_of_a_machine_are_one_command(tmp_path: Path) -> None:
    runner, root = CliRunner(), tmp_path / "d"
    assert runner.invoke(app, ["deploy", "init", str(root), "--devices", "9"]).exit_code == 0
    words = ["deploy", "device", str(root), "--dry-run"]
    some = runner.invoke(app, [*words, "--nodes", "1-3,7"])
    assert some.output.count("-m freshet.flower.node") == 4 and some.output.count("freshet.flower.warm executor") == 1
    for wrong in ([], ["--node", "1", "--nodes", "2"], ["--nodes", "3-1"], ["--nodes", "a"], ["--nodes", "-2"]):
        done = runner.invoke(app, [*words, *wrong])
        assert done.exit_code != 0 and isinstance(done.exception, ConfigError | SystemExit), wrong
    missing = runner.invoke(app, [*words, "--nodes", "8-9"])
    assert isinstance(missing.exception, RunError) and "node_9 is missing" in str(missing.exception)
    (root / "device.toml").write_text('[device]\nsuperlink = "127.0.0.1:18000"\nport = 20000\n')
    both = runner.invoke(app, [*words, "--nodes", "1,2"])
    assert isinstance(both.exception, ConfigError) and "remove both to start several" in str(both.exception)


def test_dry_run_prints_the_commands(tmp_path: Path) -> None:
    runner, root = CliRunner(), str(tmp_path / "d")
    assert runner.invoke(app, ["deploy", "init", root, "--devices", "2", "--host", "h.example"]).exit_code == 0
    server = runner.invoke(app, ["deploy", "server", root, "--dry-run"])
    assert "-m freshet.flower.superlink_auth" in server.output and "supernode register" in server.output
    device = runner.invoke(app, ["deploy", "device", root, "--node", "1", "--data", "m:load", "--dry-run"])
    assert "-m freshet.flower.node" in device.output and "h.example:18000" in device.output
    assert "freshet.flower.node" not in runner.invoke(app, ["deploy", "status", root]).output
    local = runner.invoke(app, ["deploy", "local", "--devices", "2", "--dry-run"])
    assert (
        local.output.count("freshet.flower.node") == 2 and local.output.count("freshet.flower.warm executor 2 1") == 1
    )
    own = runner.invoke(app, ["deploy", "local", "--devices", "2", "--trainer", "mine:my_train", "--dry-run"])
    assert own.output.count('trainer="mine:my_train"') == 2
    device = runner.invoke(app, ["deploy", "device", root, "--node", "1", "--trainer", "mine:my_train", "--dry-run"])
    assert 'trainer="mine:my_train"' in device.output
    plain = runner.invoke(app, ["deploy", "app", str(tmp_path / "app")])
    assert plain.exit_code == 0 and (tmp_path / "app" / "pyproject.toml").is_file()


def test_a_federation_of_ones_own_is_deployed_with_its_settings(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine_made.py").write_text(
        "import numpy as np, torch, freshet\n"
        "def make():\n"
        "    x, y = np.zeros((60, 6), np.float32), np.arange(60) % 3\n"
        "    training = {'lr': 0.25, 'epochs': 2}\n"
        "    given = {'devices': 10, 'method': 'fedbuff', 'training': training}\n"
        "    return freshet.Federation(torch.nn.Linear(6, 3), (x, y), (x, y), **given)\n"
        "def nothing(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["deploy", "local", "--devices", "2", "--dry-run", "--keep", "kept", "--federation"]
    done = CliRunner().invoke(app, [*words, "mine_made:make"])
    assert done.exit_code == 0, done.output
    assert done.output.count("freshet.flower.node") == 2
    config = resolve(load_tables(tmp_path / "kept" / "federation.toml"))
    assert (config.method_name, config.training.lr, config.fleet.devices) == ("fedbuff", 0.25, 2)
    assert (config.data.name, config.model.name, config.run.trigger) == ("custom", "custom", "concurrency")
    package = tmp_path / "kept" / "app" / "freshet_app"
    for name in ("server_app.py", "client_app.py"):
        text = (package / name).read_text()
        compile(text, name, "exec")
        assert "from mine_made import make" in text and repr(str(tmp_path)) in text
    for wrong, said in (
        ("mine_made:nothing", "returns int; return a Federation"),
        ("mine_made", "must be module:function"),
    ):
        failed = CliRunner().invoke(app, [*words, wrong])
        assert failed.exit_code != 0 and said in str(failed.exception)


@pytest.mark.parametrize("code", [200, 400, 404, 415, 500])
def test_superlink_that_answers_strangers_is_refused(made: Folder, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(code))
    with pytest.raises(RunError, match="lets strangers start apps"):
        commands.check_auth(made)
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(401))
    commands.check_auth(made)


def test_superlink_that_does_not_answer_is_one_sentence(made: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "post", refuse)
    with pytest.raises(RunError, match="does not answer"):
        commands.check_auth(made)


def test_credentials_are_readable_by_their_owner_only(made: Folder) -> None:
    commands.connect(made)
    commands.connect(made)  # the second start of a server
    stored = made.state / "flwr" / "credentials.yaml"
    for path in (stored, made.control_token, made.executor_secret):
        assert path.stat().st_mode & 0o777 == 0o600
    assert made.control_token.read_text() != made.executor_secret.read_text()


def test_device_is_locked_out_while_the_server_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``revoke`` needed a running server, so a stolen key stayed valid until the next start."""
    folder = init(tmp_path, TABLES, [], {"port": free_ports(1)[0]})
    commands.write_nodes(folder, {0: 700, 1: 701})
    done = CliRunner().invoke(app, ["deploy", "revoke", str(tmp_path), "--node", "1"], catch_exceptions=False)
    assert done.exit_code == 0 and "device 1 is locked out" in done.output
    assert folder.registered_nodes() == {0: 700} and not Path(f"{folder.key(1)}.pub").exists()
    assert folder.key(1).with_suffix(".revoked").is_file()
    assert folder.access_log.read_text().endswith(" device 1: its key was revoked\n")
    called: list[str] = []
    monkeypatch.setattr(commands, "call", lambda command: called.append(command.name))
    monkeypatch.setattr(commands, "_listens", lambda port: True)
    commands.revoke(folder, 0)
    assert called == ["unregister 700"], "a running SuperLink forgets the node, too"
    commands.register_all(folder, 2)
    assert called == ["unregister 700"], "and its key is not registered again"


@pytest.mark.parametrize(("seconds", "words"), [(86400, "ahead of"), (-86400, "behind"), (-200, ""), (5, "")])
def test_wrong_clock_of_a_device_is_one_sentence(
    made: Folder, monkeypatch: pytest.MonkeyPatch, seconds: int, words: str
) -> None:
    at = format_datetime(datetime.now(UTC) - timedelta(seconds=seconds), usegmt=True)
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, headers={"date": at}))
    problem = pytest.raises(RunError, match=f"the clock of this machine is 86(400|39[89]) s {words} the server's")
    with problem if words else nullcontext():
        commands.check_clock(made)


def test_device_may_start_before_its_server(made: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "get", refuse)
    commands.check_clock(made)


# ---- before a device connects


@pytest.fixture
def machine(tmp_path: Path, made: Folder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine of device 1: its key, the certificate and the settings of devices, and nothing else."""
    for name in ("certificates/ca.crt", "keys/node_1", "device.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((made.root / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(commands, "check_clock", lambda folder: None)
    monkeypatch.setattr(running, "run_devices", lambda *_: pytest.fail("it has started"))
    return tmp_path


def checked(*options: str) -> Any:
    return CliRunner().invoke(app, ["deploy", "device", ".", "--node", "1", "--check", *options])


def test_device_checks_its_data_and_model_and_starts_nothing(machine: Path) -> None:
    np.savez(machine / "mine.npz", x=np.zeros((5, 1, 8, 8), np.float32), y=np.zeros(5, np.int64))
    (machine / "my_parts_a.py").write_text(
        "import numpy as np\nfrom torch import nn\n\n\ndef load(node):\n    return np.zeros((3, 4)), np.zeros(3)\n\n\n"
        "def net():\n    return nn.Linear(4, 2)\n"
    )
    assert checked("--data", "mine.npz").output == "data: 5 samples of shape (1, 8, 8)\n"
    done = checked("--data", "my_parts_a:load", "--model", "my_parts_a:net")
    assert done.output == "data: 3 samples of shape (4,)\nmodel: 10 parameters\n" and done.exit_code == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data", "missing.npz"], "missing.npz"),
        (["--data", "no_such_module:load"], "--data: no_such_module:load cannot be loaded"),
        (["--data", "my_parts_b:nothing"], "--data: my_parts_b:nothing cannot be loaded"),
        (["--data", "my_parts_b:fails"], r"--data: my_parts_b:fails fails \(ValueError: no samples today\)"),
        (["--data", "my_parts_b:uneven"], "--data: my_parts_b:uneven gives 3 samples and 2 labels"),
        (["--model", "my_parts_b:fails"], "--model: my_parts_b:fails fails"),
        (["--data", "words"], "--data: must be a .npz file"),
    ],
)
def test_device_that_cannot_train_does_not_connect(machine: Path, options: list[str], sentence: str) -> None:
    """A mistyped module was a traceback in the middle of the first trip."""
    (machine / "my_parts_b.py").write_text(
        "def fails(*_):\n    raise ValueError('no samples today')\n\n\n"
        "def uneven(node):\n    return [1, 2, 3], [1, 2]\n"
    )
    for more in (["--check"], []):
        done = CliRunner().invoke(app, ["deploy", "device", ".", "--node", "1", *more, *options])
        assert isinstance(done.exception, FreshetError)
        assert re.search(sentence, str(done.exception)), done.exception


def test_device_beside_its_server_is_checked_whole(made: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "check_clock", lambda folder: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = CliRunner().invoke(app, ["deploy", "device", str(made.root), "--node", "1", "--check"])
    assert done.exit_code == 0 and re.search(r"data: \d+ samples\nmodel: digits", done.output), done.output


# ---- ends


def test_server_of_an_ended_run_says_so(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    folder.out().mkdir()
    (folder.out() / "config.toml").write_text("")
    (folder.out() / "summary.json").write_text('{"status": "finished"}')
    done = CliRunner().invoke(app, ["deploy", "server", str(tmp_path)])
    assert re.search(r"has ended \(finished\); for another one, move that folder away", str(done.exception))


def test_resume_names_the_command_of_a_deployment(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    (folder.out() / "checkpoint").mkdir(parents=True)
    (folder.out() / "config.toml").write_text("")
    (folder.out() / "checkpoint" / "journal-000000000000").touch()
    done = CliRunner().invoke(app, ["resume", str(folder.out())])
    assert str(done.exception).endswith(f"resume it with: freshet deploy server {folder.root}")


def test_deployment_without_uploads_says_why() -> None:
    facts = {"method": "fedasmu", "status": "finished", "uploads": 0, "rejected": 0, "virtual_time": 90.0, "lost": 0}
    [none] = remarks(facts | {"real_time": True, "trips": 0}, [])
    assert none.endswith("no device was online; start them with freshet deploy device")
    [some] = remarks(facts | {"real_time": True, "trips": 3}, [])
    assert "3 trips were in flight" in some and "fleet.on_seconds" not in none + some
