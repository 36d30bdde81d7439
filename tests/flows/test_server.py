"""The protection of Prefect's servers: names, origins, tokens, passwords. And killed servers."""

import base64
import os
import re
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import httpx
import pytest
import websockets.exceptions
from prefect.deployments.runner import DeploymentApplyError
from websockets.sync.client import connect

from flows.__main__ import parser_of
from flows.pipeline import commands, records
from flows.serve import schedule, server, ui
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.processes.ports import free_port
from tasks.common.tracking import runs, views
from tests.flows.project import Project
from tests.flows.test_processes import descendants, is_gone
from tests.patience import PATIENCE, wait_for

FOREIGN = "http://pages.example"


def answer(url: str, body: object = None, **headers: str) -> httpx.Response:
    method = "GET" if body is None else "POST"
    return httpx.request(method, url, json=body, headers=headers, timeout=PATIENCE, trust_env=False)


def test_server_accepts_its_own_names_only(prefect_url: str) -> None:
    port = prefect_url.rpartition(":")[2].partition("/")[0]
    for name in (f"localhost:{port}", "127.0.0.1"):
        assert answer(f"{prefect_url}/admin/version", Host=name).status_code == 200
    for name in (f"rebound.example:{port}", "127.0.0.1.example", ""):
        assert answer(f"{prefect_url}/admin/version", Host=name).status_code == 400


def test_requests_of_other_origins_are_refused(prefect_url: str) -> None:
    port = prefect_url.rpartition(":")[2].partition("/")[0]
    own = prefect_url.removesuffix("/api")
    assert answer(f"{prefect_url}/admin/version", Origin=own).status_code == 200
    for origin in (FOREIGN, "null", "http://127.0.0.1", f"http://localhost:{port}"):
        assert answer(f"{prefect_url}/admin/version", Origin=origin).status_code == 403
        refusal = answer(f"{prefect_url}/flows/filter", {}, Origin=origin)
        assert refusal.status_code == 403
        assert "access-control-allow-origin" not in refusal.headers
    assert answer(f"{prefect_url}/flows/filter", {}).status_code == 403  # a form has no token


def test_websockets_of_other_origins_are_refused(prefect_url: str) -> None:
    url = prefect_url.replace("http", "ws") + "/events/in"
    with connect(url, open_timeout=PATIENCE, proxy=None):
        pass
    with pytest.raises(websockets.exceptions.InvalidStatus, match="403"):
        connect(url, origin=FOREIGN, open_timeout=PATIENCE, proxy=None)


def test_settings_override_the_environment() -> None:
    from prefect.settings import Settings

    set_here = {
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "false",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "*",
        "PREFECT_UI_API_URL": "http://elsewhere/api",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**set_here, **server.settings("gpu-1", "winnow:x")}.items():
            patch.setenv(name, value)
        found = Settings().server
    assert found.api.csrf_protection_enabled
    assert found.api.cors_allowed_origins == ""
    assert found.ui.api_url == "/api"
    assert found.api.auth_string is not None
    assert found.api.auth_string.get_secret_value() == "winnow:x"


@pytest.fixture
def stub() -> Iterator[ThreadingHTTPServer]:
    """Start a server that answers every request with its `status`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(found.status)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()


@pytest.mark.parametrize(("status", "is_open"), [(200, True), (401, False), (404, False)])
def test_open_server_leads_to_a_warning(
    stub: ThreadingHTTPServer, status: int, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stub.status = status  # type: ignore[attr-defined]
    server.warn_if_open(f"http://127.0.0.1:{stub.server_port}/api")
    assert ("accepts requests from anyone" in caplog.text) == is_open


def test_own_server_leads_to_no_warning(prefect_url: str, caplog: pytest.LogCaptureFixture) -> None:
    server.warn_if_open(prefect_url)
    assert caplog.text == ""


def test_password_is_created_once_for_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect").chmod(0o755)  # as Prefect creates it
    made = server.kept_auth()
    assert len(made) > 30
    assert server.kept_auth() == made == server.auth_file().read_text()
    assert server.auth_file().stat().st_mode & 0o777 == 0o600
    server.auth_file().chmod(0o640)
    with pytest.raises(ArtifactError, match="chmod 600"):
        server.kept_auth()
    server.auth_file().chmod(0o600)
    for damaged in ("", "winnow:\n", f"{made}\n{made}"):
        server.auth_file().write_text(damaged)
        with pytest.raises(ArtifactError, match="winnow-auth is not one line .* delete it"):
            server.kept_auth()


def parsed(**options: object) -> SimpleNamespace:
    usual = {"prefect_host": "127.0.0.1", "prefect_port": 4200, "mlflow_port": 5000, "login": False}
    return SimpleNamespace(**{**usual, **options})


@pytest.mark.parametrize(
    ("options", "has_password"),
    [({}, False), ({"login": True}, True), ({"prefect_host": "192.0.2.7"}, True)],
)
def test_reachable_server_requires_a_password(
    options: dict[str, object],
    has_password: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    auth = ui.auth_of(parsed(**options))  # type: ignore[arg-type]
    _, started = ui.servers(parsed(**options), auth)  # type: ignore[arg-type]
    prefect = next(one for one in started if one.name == "Prefect")
    assert ("PREFECT_SERVER_API_AUTH_STRING" in prefect.settings) == has_password
    assert prefect.settings["PREFECT_SERVER_API_HOST"] == prefect.host
    assert server.auth_file().exists() == has_password


def test_address_of_all_interfaces_is_refused() -> None:
    with pytest.raises(ArtifactError, match="use one address"):
        ui.auth_of(parsed(prefect_host="0.0.0.0"))  # type: ignore[arg-type]


def test_impossible_address_is_named() -> None:
    with pytest.raises(ArtifactError, match="cannot listen at http://127.0.0.1:99999: "):
        server.check_port("Prefect", "127.0.0.1", 99_999)


def test_pages_start_at_the_named_address(
    stub: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREFECT_API_URL may name the server that `winnow ui` is about to start."""
    stub.status = 200  # type: ignore[attr-defined]
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    lasting, started = ui.servers(parsed(prefect_port=9), None)  # type: ignore[arg-type]
    assert [one.name for one in started] == ["Prefect", "MLflow"]
    assert lasting == []
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{stub.server_port}/api")
    lasting, started = ui.servers(parsed(prefect_port=stub.server_port), None)  # type: ignore[arg-type]
    assert [name for name, _ in lasting] == ["Prefect"]
    (tmp_path / "params.yaml").write_text("tracking: {uri: 'http://me:secret@host'}")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    with pytest.raises(ParamsError, match="tracking.uri contains credentials"):
        ui.servers(parsed(), None)  # type: ignore[arg-type]


def test_refused_schedule_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(_: object) -> None:
        raise DeploymentApplyError("status 503\nfor more information")

    monkeypatch.setattr(schedule, "serve", refuse)
    monkeypatch.setattr(server, "provide", lambda _: None)
    monkeypatch.setattr(records, "attempt", lambda _: None)
    assert schedule.run(parser_of("serve").parse_args(["serve"])) == 1
    assert re.search("^Prefect's server at .* [(]status 503[)]: ", capsys.readouterr().err)


def server_of(flow_pid: int) -> int | None:
    """Return the process of the server that a flow has started, or None."""
    for pid in descendants(flow_pid):
        if b"uvicorn" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    return None


@pytest.mark.parametrize("when", ["at its start", "in the middle"])
def test_killed_server_ends_a_run_with_one_sentence(project: Project, when: str) -> None:
    del project.environment["PREFECT_API_URL"]
    project.environment["PREFECT_CLIENT_MAX_RETRIES"] = "1"  # not a minute for each request
    project.behave(report="meet", test="meet")
    flow = project.start("flows", "run", "--force", "report")
    if when == "in the middle":
        wait_for((project.root / "report.met").exists, flow)
    os.kill(wait_for(lambda: server_of(flow.pid), flow), signal.SIGKILL)
    (project.root / "test.met").touch()
    output, _ = flow.communicate(timeout=PATIENCE)
    assert flow.returncode == 1
    assert "Traceback" not in output
    error, remedy = output.splitlines()[-2:]
    assert remedy.endswith("winnow run --force report")
    if when == "at its start":
        assert "Prefect's server did not start" in error
        return
    assert "[15/15] report: ran" in output
    assert "has failed this run" in error
    assert "run the same command again to resume" in error


@pytest.mark.slow
def test_pages_with_a_password(project: Project) -> None:
    del project.environment["PREFECT_API_URL"]
    port = free_port()
    ports = ("--prefect-port", str(port), "--mlflow-port", str(free_port()))
    pages = project.start("flows", "ui", "--login", *ports)
    assert pages.stdout is not None
    printed: list[str] = []
    while not printed or not printed[-1].startswith("Ctrl-C"):
        printed.append(pages.stdout.readline())
        assert printed[-1]
    file = Path(project.environment["PREFECT_HOME"]) / "winnow-auth"
    assert f"export PREFECT_API_AUTH_STRING=$(cat {file})" in "".join(printed)
    url = f"http://127.0.0.1:{port}/api"
    basic = "Basic " + base64.b64encode(file.read_bytes()).decode()
    assert answer(f"{url}/admin/version").status_code == 401
    assert answer(f"{url}/admin/version", Authorization=basic).status_code == 200
    project.environment["PREFECT_API_URL"] = url
    refused = project.flow(expect=1)
    assert "401 Unauthorized" in refused.splitlines()[-2]
    assert "PREFECT_API_AUTH_STRING" in refused
    assert "Traceback" not in refused
    project.environment["PREFECT_API_AUTH_STRING"] = file.read_text()
    assert "nothing to do" in project.flow()
    processes = descendants(pages.pid)
    pages.send_signal(signal.SIGINT)
    pages.communicate()
    assert pages.returncode == 0
    assert all(is_gone(pid) for pid in processes)


def test_pages_of_mlflow_show_runs_and_accept_requests_of_their_own_pages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    layout, port = Layout(tmp_path / "data"), free_port()
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(ui, "LAYOUT", layout)
    (tmp_path / "params.yaml").write_text("store: {}\n")
    uri = f"sqlite:///{layout.tracking / 'mlflow.db'}"
    layout.tracking.mkdir(parents=True)
    client = MlflowClient(uri)
    experiment = client.create_experiment("winnow", (layout.tracking / "artifacts").as_uri())
    run = client.create_run(experiment, run_name="grpo/0").info.run_id
    client.log_text(run, "the curve", "curve.txt")
    _, started = ui.servers(parsed(mlflow_port=port), None)  # type: ignore[arg-type]
    pages = next(one for one in started if one.name == "MLflow")
    search = f"{pages.page}/ajax-api/2.0/mlflow/runs/search"
    body = {"experiment_ids": [experiment]}
    with ui.serving(pages) as (child, log):
        ui.wait_until_up(pages, child, log)
        assert runs.page(*ui.record()) == views.PATH.format(experiment)
        assert client.get_experiment(experiment).tags[views.TAG] == views.TAGS[views.TAG]
        client.set_experiment_tag(experiment, views.TAG, "changed by its user")
        assert runs.page(*ui.record()) == views.PATH.format(experiment)
        assert client.get_experiment(experiment).tags[views.TAG] == "changed by its user"
        assert runs.page(str(tmp_path / "params.yaml"), "winnow") == ""
        assert views.SCRIPT in answer(pages.page).text
        script = re.search(r'src="([^"]+\.js)"', answer(pages.page).text)
        assert script is not None
        assert answer(f"{pages.page}/{script[1]}").status_code == 200
        assert "grpo/0" in answer(search, body, Origin=pages.page).text
        assert "grpo/0" in answer(search, body).text
        content = answer(f"{pages.page}/get-artifact?path=curve.txt&run_uuid={run}")
        assert content.text == "the curve"
        make = f"{pages.page}/api/2.0/mlflow/experiments/create"
        for origin in (f"http://127.0.0.1:{port + 1}", f"http://localhost:{port}", FOREIGN, "null"):
            refusal = answer(make, {"name": "foreign"}, Origin=origin)
            assert refusal.status_code == 403
            assert "access-control-allow-origin" not in refusal.headers
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            preflight = httpx.options(make, headers=asked, trust_env=False)
            assert (preflight.status_code, "foreign" in preflight.text) == (403, False)
        for name in ("10.example.com", f"rebound.example:{port}"):
            assert answer(f"{pages.page}/health", Host=name).status_code == 400
        proxied = "2.0/mlflow-artifacts/artifacts/x.txt"
        for place in (f"api/{proxied}", f"ajax-api/{proxied}"):
            written = httpx.put(f"{pages.page}/{place}", content=b"x", trust_env=False)
            assert written.status_code == 503
        created = answer(make, {"name": "own"}, Origin=pages.page).json()["experiment_id"]
    names = [one.name for one in client.search_experiments()]
    assert "own" in names
    assert "foreign" not in names
    place = client.get_experiment(created).artifact_location
    assert place == f"{(layout.tracking / 'artifacts').as_uri()}/{created}"
    assert {path.name for path in tmp_path.iterdir()} == {"data", "params.yaml"}
