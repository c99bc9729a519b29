"""The profiler: where it was asked for alone, one trace at a time, and never for long."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from jaxpage.serving.http.answers import error_answer
from jaxpage.serving.metrics import profiling
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.errors import ApiError


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Returns what is asked of JAX's profiler, which is itself slow to start."""
    requested: list[str] = []
    monkeypatch.setattr(
        profiling.jax.profiler,
        "start_trace",
        lambda directory: requested.append(f"start {directory}"),
    )
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: requested.append("stop"))
    yield requested


def test_without_a_directory_there_is_nothing():
    assert profiling.profiler_routes(ServerConfig()) == []


def test_one_trace_at_a_time(traces):
    routes = profiling.profiler_routes(ServerConfig(profile_directory="/traces"))
    app = Starlette(
        routes=routes,
        exception_handlers={ApiError: lambda request, error: error_answer(error, request.url.path)},
    )
    with TestClient(app) as client:
        assert client.get("/start_profile").status_code == 405
        assert client.post("/stop_profile").status_code == 409
        assert client.post("/start_profile").json() == {"status": "started"}
        refused = client.post("/start_profile")
        assert (
            refused.status_code == 409
            and refused.json()["error"]["message"] == "A trace is running already"
        )
        assert client.post("/stop_profile").json() == {"status": "written"}
        assert client.post("/stop_profile").status_code == 409
        assert (
            client.post("/start_profile").status_code
            == client.post("/stop_profile").status_code
            == 200
        )
    assert traces == ["start /traces", "stop"] * 2


def test_a_trace_that_nobody_ends_ends_by_itself(traces, monkeypatch):
    monkeypatch.setattr(profiling, "MAX_SECONDS", 0.01)

    async def run() -> None:
        profiler = profiling.Profiler("/traces")
        assert await profiler.start()
        while traces[-1] != "stop":
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_trace_is_a_file_that_jax_wrote(tmp_path):
    async def run() -> None:
        profiler = profiling.Profiler(str(tmp_path))
        assert await profiler.start() and await profiler.stop()

    asyncio.run(run())
    assert list(tmp_path.rglob("*.xplane.pb"))
