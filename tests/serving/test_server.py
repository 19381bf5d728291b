"""What stands before the routes, and the routes around them: keys, hosts, sizes, models, health, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgec.serving.limits import loopback_hosts
from tests.serving.conftest import Connect

JSON = {"content-type": "application/json"}


def test_models_are_listed_and_found_by_their_exact_name(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["parrot"] and listed["data"][0]["max_model_len"] == 512
    assert client.get("/v1/models/parrot").json()["id"] == "parrot"
    for name in ("other", "..%2f..%2fetc%2fpasswd", "parrot/", "Parrot"):
        assert client.get(f"/v1/models/{name}").status_code == 404


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)])
def test_errors_of_http_have_openai_s_shape(client: TestClient, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status and set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_key_is_asked_for_where_there_is_one(connect: Connect) -> None:
    client = connect(api_key="sesame")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Bearer é"}):
        response = client.get("/v1/models", headers={k: v.encode() for k, v in headers.items()})
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_key_is_asked_for_before_the_body_is_read(connect: Connect) -> None:
    client = connect(api_key="sesame")
    assert client.post("/v1/completions", content=b"x" * 100, headers=JSON).status_code == 401


def test_a_body_that_is_too_long_is_413_with_and_without_a_length(connect: Connect) -> None:
    client = connect(body_bytes=1000)

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100
        yield b'"}'

    assert client.post("/v1/completions", content=b"x" * 1001, headers=JSON).status_code == 413
    assert client.post("/v1/completions", content=pieces(), headers=JSON).status_code == 413


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff", b"[" * 100_000, b"{}x"],
)
def test_a_body_that_is_no_request_is_400(client: TestClient, body: bytes) -> None:
    response = client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_browser_s_simple_request_is_refused(client: TestClient) -> None:
    """`text/plain` crosses origins without a preflight; any page could use the server of its visitor."""
    body = json.dumps({"prompt": "x"})
    assert client.post("/v1/completions", content=body, headers={"content-type": "text/plain"}).status_code == 415


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("evil.example:8000", 403), ("", 403)],
)
def test_on_loopback_only_its_own_names_are_answered(connect: Connect, host: str, status: int) -> None:
    client = connect(hosts=loopback_hosts("127.0.0.1"))
    assert client.get("/health", headers={"host": host}).status_code == status


def test_hosts_may_be_added_and_public_addresses_take_any() -> None:
    assert "phone.lan" in (loopback_hosts("127.0.0.1", ("phone.lan",)) or ())
    assert loopback_hosts("0.0.0.0") is None and loopback_hosts("0.0.0.0", ("a",)) == {"a"}


def test_metrics_count_what_happened(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "hello"})
    client.post("/v1/completions", json={"prompt": ""})
    client.get("/made/up/path")
    text = client.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert values['edgec_http_requests_total{route="/v1/completions",status="200"}'] == 1
    assert values['edgec_http_requests_total{route="/v1/completions",status="400"}'] == 1
    assert values["edgec_time_to_first_token_seconds_count"] == 1
    assert values["edgec_time_between_tokens_seconds_count"] == 4
    assert values["edgec_requests_finished_total"] == 1 and values["edgec_answer_tokens_total"] == 5
    assert values['edgec_kv_blocks{state="free"}'] == 64
    assert values['edgec_drafts_total{outcome="kept"}'] == 0
    assert "hello" not in text and "made" not in text


def test_a_bug_is_500_in_openai_s_shape_and_tells_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_(*_: Any) -> Any:
        raise RuntimeError("a secret")

    monkeypatch.setattr("edgec.serving.app.parse", break_)
    response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
