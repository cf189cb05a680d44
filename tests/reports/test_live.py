"""The page of a run as it is served: to this machine alone, read-only, and made anew when due."""

import http.client
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import trained
from windlass import api, files
from windlass.cli.report import _instructions
from windlass.errors import UserError
from windlass.reports.live import LOOPBACK, LiveServer


@pytest.fixture
def run(tmp_path_factory, tmp_path) -> Path:
    """A copy of a run."""
    place = trained.workplace(tmp_path_factory)
    return Path(shutil.copytree(trained.only_run(place), tmp_path / "run"))


@pytest.fixture
def server(run) -> Iterator[LiveServer]:
    with api.watch(run) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server: LiveServer, method: str = "GET", path: str = "/", **headers: str):
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_a_page_is_served_on_the_loopback_interface_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    status, headers, text = asked(server)
    assert status == 200 and "finished at step 4 of 4" in text and 'data-live="2000"' in text
    assert headers["Cache-Control"] == "no-store" and "connect-src 'self'" in text
    assert "Access-Control-Allow-Origin" not in headers


def test_only_the_page_can_be_had_and_only_be_read(server):
    assert asked(server, path="/about.json")[0] == 404
    assert asked(server, path="/../../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, _ = asked(server, method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert asked(server, "HEAD")[::2] == (200, "")


def test_a_name_that_points_here_from_elsewhere_gets_nothing(server):
    # As a page of another site does that has its own name lead to the loopback address.
    assert asked(server, Host="evil.example:8000")[::2] == (
        403,
        "this page is served to 127.0.0.1 alone\n",
    )
    for name in ("localhost", "127.0.0.1:9999", "[::1]:80"):  # of a tunnel, too
        assert asked(server, Host=name)[0] == 200


def test_a_page_is_made_anew_when_the_run_has_changed_and_only_then(server, run):
    _, headers, before = asked(server)
    tag = {"If-None-Match": headers["ETag"]}
    assert asked(server, **tag)[::2] == (304, "")
    with (run / "samples.txt").open("a") as file:
        file.write("--- step 4\nOnce more\n")
    status, _, after = asked(server, **tag)
    assert status == 200 and "Once more" in after and "Once more" not in before


def test_a_run_that_was_killed_is_not_training_any_more_though_no_file_changed(server, run):
    with (run / "lock").open("a") as file:
        assert files.lock(file)
        os.utime(run / "metrics.jsonl")  # so that it is looked at again
        assert "training at step 4" in asked(server)[2]
    assert "training at step" not in asked(server)[2]


def test_a_file_that_cannot_be_read_now_is_no_end_of_the_server(server, run):
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b"[1]\n")
    status, _, text = asked(server)
    assert status == 503 and "metrics.jsonl" in text
    (run / "metrics.jsonl").write_bytes(whole)
    assert asked(server)[0] == 200


def test_a_port_that_is_taken_is_refused_in_words(server, run):
    port = server.server_port
    with pytest.raises(UserError) as refused:
        api.watch(run, port=port)
    assert str(refused.value) == (
        f"--port is {port}, which cannot be listened on: Address already in use; another one from "
        "1024 to 65535 may do, and without --port a free one is chosen"
    )


def test_over_ssh_the_way_to_the_page_is_said():
    url, environ = "http://127.0.0.1:8000/", {"USER": "ann"}
    (line,) = _instructions(url, 8000, environ)
    assert line == f"live at {url} on this machine; Ctrl-C ends it"
    environ["SSH_CONNECTION"] = "10.0.0.2 50000 10.0.0.9 2222"
    _, line = _instructions(url, 8000, environ)
    assert line == (
        "over ssh: on your own machine `ssh -p 2222 -NL 8000:127.0.0.1:8000 ann@10.0.0.9`, then "
        f"open {url} there"
    )
