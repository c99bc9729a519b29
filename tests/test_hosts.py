"""Several hosts: messages of rank 0 and their effect on the others, and two processes on
loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import LLM, SamplingParams
from jaxpage.assembly import Built, Hooks, build_engine, compiling
from jaxpage.driver import Handle
from jaxpage.errors import CheckpointError, ConfigError, EngineFailed, UnsupportedError
from jaxpage.replay import replaying
from jaxpage.replay.differences import Differs
from jaxpage.replay.recorder import Recorder
from jaxpage.replay.replaying import drafts_of
from jaxpage.serving.hosts import joining
from jaxpage.serving.hosts.channel import Channel, Refused, greet_follower, greet_leader
from jaxpage.serving.hosts.follower import Follower
from jaxpage.serving.hosts.host_records import HostRecorder
from jaxpage.serving.hosts.job import hosts_of_job
from jaxpage.serving.hosts.leader import HostLost, Leader
from jaxpage.serving.hosts.secret import read_secret
from jaxpage.serving.hosts.weight_loading import (
    LoadedWeights,
    WeightsOfFollower,
    load_with_hash,
)
from jaxpage.serving.settings.resolving import resolve_both
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.step.events import Events
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint

SECRET = b"a secret of this test alone"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("hosts"), LLAMA)


# ---- lines


@contextlib.contextmanager
def greet(theirs: bytes = SECRET) -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """Opens the channel of rank 0, that of rank 1, and the latter's socket."""
    ours, other = socket.socketpair()
    with ours, other, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(greet_leader, other, theirs, 1)
        try:
            rank, leader = greet_follower(ours, SECRET)
            assert rank == 1
            with contextlib.closing(leader), contextlib.closing(joined.result()) as follower:
                yield leader, follower, other
        except Refused:
            with pytest.raises(Refused, match="another one"):
                joined.result()
            raise


class _Wire:
    """Stands in the place of a socket; the real one is closed by `greet`."""

    def __init__(self, sendall: Any) -> None:
        self.sendall = sendall

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_lines_go_both_ways_and_none_can_be_changed_or_sent_again():
    with greet() as (leader, follower, wire):
        leader.send({"event": "abort", "request_id": "a"})
        assert follower.receive() == {"event": "abort", "request_id": "a"}
        sent: list[bytes] = []
        follower._connection = _Wire(sent.append)
        follower.send({"event": "pong"})
        follower.send({"event": "pong"})
        wire.sendall(sent[0])
        assert leader.receive() == {"event": "pong"}
        wire.sendall(sent[0])
        with pytest.raises(ConnectionError, match="not what was sent"):
            leader.receive()
    with greet() as (leader, follower, wire):
        follower._connection = _Wire(lambda line: wire.sendall(line.replace(b"pong", b"ping")))
        follower.send({"event": "pong"})
        with pytest.raises(ConnectionError, match="not what was sent"):
            leader.receive()


def test_another_secret_is_refused_on_both_sides():
    with pytest.raises(Refused, match="another one"), greet(b"a secret of somebody else"):
        pass


def test_a_secret_is_needed(tmp_path):
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(
        ConfigError, match=r"at least 16 bytes, and JAXPAGE_HOSTS_SECRET has 0; openssl"
    ):
        read_secret(ServerConfig(), {})
    with pytest.raises(ConfigError, match=r"hosts_secret_file .*secret has 5"):
        read_secret(
            ServerConfig(hosts_secret_file=str(tmp_path / "secret")),
            {"JAXPAGE_HOSTS_SECRET": "x" * 32},
        )


@pytest.mark.parametrize(
    ("engine", "server", "message"),
    [
        ({}, {"host_rank": 1}, "host_rank: is 1, and num_hosts is 1"),
        (
            {"tensor_parallel_size": 2},
            {"num_hosts": 2},
            "coordinator: is needed with num_hosts = 2",
        ),
        (
            {},
            {"num_hosts": 2, "coordinator": "a:1"},
            "num_hosts: 2 hosts need a tensor_parallel_size that they can share",
        ),
        *(
            (
                {"tensor_parallel_size": 2, **engine},
                {"num_hosts": 2, "coordinator": "a:1", **server},
                message,
            )
            for engine, server, message in (
                (
                    {"event_log": "log"},
                    {"host_rank": 1},
                    "event_log is not supported with host_rank = 1: rank 0 writes it",
                ),
                (
                    {"prefix_cache_directory": "d"},
                    {},
                    "prefix_cache_directory is not supported with num_hosts = 2",
                ),
                (
                    {"enable_prompt_embeds": True},
                    {},
                    "enable_prompt_embeds is not supported with num_hosts = 2",
                ),
                (
                    {"enable_lora": True},
                    {"lora_directory": "d"},
                    "lora_directory is not supported with num_hosts = 2",
                ),
                (
                    {"event_log": "log"},
                    {"weights_directory": "."},
                    "event_log with weights_directory is not supported with num_hosts = 2",
                ),
                (
                    {},
                    {"incident_steps": 4, "host_rank": 1},
                    "incident_steps is not supported with host_rank = 1",
                ),
            )
        ),
    ],
)
def test_what_several_hosts_cannot_do_is_refused_by_name(engine, server, message):
    with pytest.raises((ConfigError, UnsupportedError), match=re.escape(message)):
        resolve_both(None, engine, server, environment={})


SLURM = {
    **{"SLURM_JOB_ID": "4095", "SLURM_STEP_NODELIST": "node[007,009]", "SLURM_NTASKS": "2"},
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
}


def test_the_hosts_of_a_job(monkeypatch):
    """Slurm sets its variables in the steps of a job, and JAX reads them."""
    both = EngineConfig(tensor_parallel_size=2), ServerConfig(coordinator="auto")
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="auto finds no job of Slurm, Open MPI or Kubernetes"):
        hosts_of_job(*both)
    for name, value in {**SLURM, "JAX_LOCAL_DEVICE_IDS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS")
    hosts = hosts_of_job(*both)
    assert (hosts.num_hosts, hosts.host_rank, hosts.coordinator) == (2, 1, "node007:65534")
    assert os.environ["JAX_LOCAL_DEVICE_IDS"] == "0", "a process for each device"
    assert hosts_of_job(both[0], hosts) == hosts
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS")
    hosts_of_job(EngineConfig(tensor_parallel_size=4), both[1])
    assert "JAX_LOCAL_DEVICE_IDS" not in os.environ, "a process takes all devices of its machine"
    with pytest.raises(
        ConfigError, match="2 hosts need a tensor_parallel_size that they can share, not 1"
    ):
        hosts_of_job(EngineConfig(), both[1])
    with pytest.raises(ConfigError, match="'auto' takes num_hosts and host_rank from the job"):
        ServerConfig(coordinator="auto", num_hosts=2)


def test_the_hash_of_a_model_is_that_of_its_files(tmp_path):
    for name in ("a", "b"):
        random_checkpoint(tmp_path / name, LLAMA)
    assert joining.model_hash(tmp_path / "a") == joining.model_hash(tmp_path / "b")
    weights = tmp_path / "b" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert joining.model_hash(tmp_path / "a") != joining.model_hash(tmp_path / "b")


def test_drafters_and_adapters_are_compared_by_their_files(directory, tmp_path):
    def about(number: int) -> Any:
        drafting = {"method": "draft_model", "model": str(drafters[number])}
        settings = {"model": str(directory), "speculative_config": drafting}
        return joining._about(
            EngineConfig(**settings), ServerConfig(lora_modules=(f"one={adapters[number]}",))
        )

    drafters = [random_checkpoint(tmp_path / f"drafter {number}", LLAMA) for number in range(3)]
    adapters = [random_adapter(tmp_path / f"adapter {number}") for number in range(3)]
    assert joining._difference(about(1), about(0), 1) is None
    weights = adapters[1] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    why = re.escape(
        f"(hash {joining.model_hash(adapters[1])} on rank 1, {joining.model_hash(adapters[0])} "
        f"on rank 0)"
    )
    assert re.fullmatch(
        f"the files of the LoRA adapter 'one' differ {why}",
        joining._difference(about(1), about(0), 1),
    )
    (drafters[2] / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 5.0}))
    assert joining._difference(about(2), about(0), 1).startswith(
        "the files of the drafter differ (hash "
    )
    without = {**about(0), "files": {**about(0)["files"], "drafter": None}}
    assert joining._difference(without, about(0), 3) == "the drafter is given on rank 0 alone"
    assert joining._difference(about(0), without, 3) == "the drafter is given on rank 3 alone"


def test_all_hosts_take_other_weights_or_none_does(directory):
    with_weights, without = (
        joining._about(EngineConfig(model=str(directory)), ServerConfig(weights_directory=path))
        for path in (".", None)
    )
    why = joining._difference(without, with_weights, 1)
    assert why == "the weights_directory is given on rank 0 alone"


def on_both_hosts(
    function: Any, of_leader: dict[str, Any], of_follower: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns what each host's `function` gives of its own plan, or why it does not."""

    def of(record: dict[str, Any], channel: Channel, other: int, number: int) -> Any:
        try:
            return function(
                SimpleNamespace(record=lambda: record), {other: channel}, host_rank=number
            )
        except joining.HostsError as refusal:
            return str(refusal)

    with greet() as (leader, follower, _), ThreadPoolExecutor(1) as pool:
        future = pool.submit(of, of_follower, follower, 0, 1)
        return of(of_leader, leader, 1, 0), future.result()


PLANNED = {"dtype": "float32", "num_blocks": 64, "swap_space_blocks": 63, "buckets": [[2, 2]]}


def test_both_hosts_get_the_same_error_of_engines_that_differ():
    for function, changed, why in (
        (
            joining.agree,
            {"buckets": [[4, 4]]},
            r"buckets is \[\[4, 4\]\] on rank 1, \[\[2, 2\]\] on rank 0",
        ),
        (
            joining.min_sizes,
            {"dtype": "bfloat16"},
            "dtype is 'bfloat16' on rank 1, .*: give --dtype on all",
        ),
    ):
        message, of_follower = on_both_hosts(function, PLANNED, {**PLANNED, **changed})
        assert message == of_follower and re.fullmatch(
            f"rank 1 has another engine than rank 0: {why}", message
        )


@pytest.mark.parametrize(
    ("leader", "follower", "minimum"),
    [
        ((64, 63), (64, 63), {}),
        ((64, 63), (32, 31), {"num_blocks": 32, "swap_space_blocks": 31}),
        ((48, 0), (64, 63), {"num_blocks": 48, "swap_space_blocks": 0}),
        ((64, 31), (32, 31), {"num_blocks": 32, "swap_space_blocks": 31}),
        ((64, 63), (64, 15), {"swap_space_blocks": 15}),
    ],
)
def test_the_host_with_the_least_memory_sizes_all_pools(leader, follower, minimum, caplog):
    both = (
        dict(zip(("num_blocks", "swap_space_blocks"), sizes, strict=True))
        for sizes in (leader, follower)
    )
    assert on_both_hosts(joining.min_sizes, *(PLANNED | sizes for sizes in both)) == (
        minimum,
        minimum,
    )
    said = [record.message for record in caplog.records if record.message.startswith("num_blocks")]
    smaller, no_more = (
        int(follower[0] < leader[0]),
        "since rank {} has memory for no more; rank {} has memory for 64",
    )
    text = (
        f"num_blocks is {minimum.get('num_blocks')} on all hosts, "
        f"{no_more.format(smaller, 1 - smaller)}"
    )
    assert said == [text] * 2 * ("num_blocks" in minimum)


def test_an_engine_is_planned_again_with_sizes_that_fit_others(directory, monkeypatch):
    """It is planned before its weights are loaded, with what follows from the sizes."""

    class Loads(Exception):
        pass

    def load(files: Any, spec: Any, *_: Any, **options: Any) -> None:
        seen.append(spec.memory)
        raise Loads

    def plan_again(spec: Any) -> dict[str, int]:
        seen.append(spec.memory)
        return {"num_blocks": 9, "swap_space_blocks": 3}

    seen: list[Any] = []
    monkeypatch.setattr(compiling, "load_parameters", load)
    with pytest.raises(Loads):
        build_engine(
            EngineConfig(model=str(directory), block_size=4, max_num_seqs=2),
            Hooks(revise_sizes=plan_again),
        )
    before, after = seen
    assert before.num_blocks > 9 and before.num_host_blocks > 3 and before.max_model_len > 32
    assert (after.num_blocks, after.num_host_blocks, after.max_model_len) == (9, 3, 32)


# ---- two engines of one process, without a network


class _Silent:
    """Is a channel of which nothing is asked but to be there."""

    def set_timeout(self, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def engine_records(directory):
    """Returns what an engine tells of two samples, a request that is aborted, and a reset."""
    records: list[Any] = []
    with make_llm(directory) as llm:
        engine = llm._engine
        engine.events = Recorder(lambda record: records.append(json.loads(json.dumps(record))))
        params = SamplingParams(
            temperature=0.9, seed=5, n=2, max_tokens=6, ignore_eos=True, logprobs=1
        )
        engine.add("two", engine.prepare(None, (3, 4, 5), params))
        engine.step()
        engine.add(
            "one",
            engine.prepare(
                None, tuple(range(1, 30)), SamplingParams(max_tokens=40, ignore_eos=True)
            ),
        )
        engine.step()
        engine.step()
        engine.abort("one")
        engine.reset_prefix_cache()
        while engine.has_unfinished:
            engine.step()
        engine.events = Events()
    return records


def follow(directory: Path, records: list[Any], **settings: Any) -> None:
    with make_llm(directory, **settings) as llm:
        other = Follower(llm._engine, _Silent(), 1.0)  # type: ignore[arg-type]
        for record in records:
            other.follow(json.loads(json.dumps(record)))
        assert not other._ours and not llm._engine.has_unfinished
        invariants(llm)


def test_a_follower_does_what_rank_0_says(engine_records, directory):
    assert {"arrival", "plan", "result", "abort", "reset"} <= {
        record["event"] for record in engine_records
    }
    follow(directory, engine_records)


@pytest.mark.parametrize(
    ("event", "field", "named"),
    [
        ("plan", "tables", r"tables\[0\] of its plan"),
        ("result", "tokens", r"tokens\[0\] of sequence 0 of its result"),
    ],
)
def test_the_first_difference_is_reported_by_its_step(
    engine_records, directory, event, field, named
):
    records = json.loads(json.dumps(engine_records))
    step, changed = next(
        (record["step"], record) for record in records if record["event"] == event and record[field]
    )
    changed[field][0] = [0, 1, [0, 9]] if field == "tables" else 999
    with pytest.raises(
        Differs, match=f"First difference: step {step}, {named}\n  rank 0: +.*9.*\n  this rank: "
    ):
        follow(directory, records)


# ---- other weights


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Writes directories with other weights: whole ones, a file that is cut off, and a NaN in what
    rank 1 of two has.
    """
    parent = tmp_path_factory.mktemp("others")
    for name in ("new", "newer", "cut", "nan"):
        random_checkpoint(parent / name, LLAMA, seed=1 + (name == "newer"))
    whole = (parent / "cut" / "model.safetensors").read_bytes()
    (parent / "cut" / "model.safetensors").write_bytes(whole[:-64])
    tensors = load_file(parent / "nan" / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][-1, 3] = np.nan
    save_file(tensors, parent / "nan" / "model.safetensors")
    return parent


@pytest.fixture(scope="module")
def update_records(directory, others):
    """Returns what an engine tells of a request whose weights are replaced twice while it runs."""
    records: list[Any] = []
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    with make_llm(directory) as llm:
        engine = llm._engine
        engine.events = HostRecorder(lambda record: records.append(json.loads(json.dumps(record))))
        engine.add("a", engine.prepare(None, (3, 4, 5), params))
        for number, (name, mode) in enumerate((("new", "keep"), ("newer", "recompute"))):
            for _ in range(4):
                engine.step()
            built = Built(engine, None, {}, llm.spec, llm._model)
            loaded = load_with_hash(built, others / name, check_finite=True)
            order = {"number": number, "path": name, "check_finite": True}
            records.append({"event": "load", **order})
            engine.replace_weights(loaded.weights, mode, loaded.checksum)
            records.append({"event": "forget", "number": number})
        while engine.has_unfinished:
            engine.step()
        engine.report_end()
        engine.events = Events()
    return records


@contextlib.contextmanager
def follower_of(directory: Path, weights: Path) -> Iterator[tuple[Channel, Any]]:
    """Starts a follower, and returns the channel of rank 0 to it and the future of its exit
    status.
    """
    with (
        make_llm(directory) as llm,
        greet() as (leader, channel, _),
        ThreadPoolExecutor(1) as pool,
    ):
        built = Built(llm._engine, None, {}, llm.spec, llm._model)
        follower = Follower(llm._engine, channel, 30.0, weights=WeightsOfFollower(built, weights))
        leader.set_timeout(30.0)
        status = pool.submit(follower.run)
        try:
            yield leader, status
        finally:  # a follower whose connection ends without this ends the process
            leader.send({"event": "end"})
            status.result(60)
            for thread in threading.enumerate():
                if thread.name == "jaxpage-rank-0":
                    thread.join(10)


def test_a_follower_takes_the_weights_that_rank_0_takes(update_records, directory, others):
    """Its tokens and log probabilities are those of rank 0, or it would tell of a difference."""
    assert [record["event"] for record in update_records].count("update") == 2
    with follower_of(directory, others) as (leader, status):
        for record in update_records:
            leader.send(record)
            if record["event"] == "load":
                checksum = joining.model_hash(others / record["path"])
                assert leader.receive() == {"event": "loaded", "checksum": checksum}
        assert status.result(60) == 0


def test_a_follower_says_what_is_wrong_with_weights(update_records, directory, others):
    order = {"event": "load", "check_finite": True}
    wrong = {
        "cut": "model.safetensors",
        "nan": "q_proj.weight' has numbers that are NaN",
        "no": "no such directory below weights_directory",
        "..": "no such directory",
    }
    with follower_of(directory, others) as (leader, status):
        for number, (path, why) in enumerate(wrong.items()):
            leader.send({**order, "number": number, "path": path})
            assert why in leader.receive()["why"]
        # An update that is withdrawn while it is loaded leaves nothing.
        leader.send({"event": "forget", "number": 9})
        leader.send({**order, "number": 9, "path": "new"})
        assert leader.receive()["checksum"] == joining.model_hash(others / "new")
        leader.send(next(record for record in update_records if record["event"] == "update"))
        assert "weights that this rank has not loaded" in leader.receive()["difference"]
        assert status.result(60) == 1


def test_rank_0_takes_no_weights_unless_all_hosts_have_the_same():
    def load(answer: Any) -> Any:
        with greet() as (ours, theirs, wire), ThreadPoolExecutor(1) as pool:
            leader = Leader({1: ours}, 30.0)
            leader.start(lambda why: None)
            loading = pool.submit(
                leader.load_on_all,
                7,
                "new",
                check_finite=False,
                load=lambda: LoadedWeights("weights", "a hash"),
            )
            order = {"number": 7, "path": "new", "check_finite": False}
            assert theirs.receive() == {"event": "load", **order}
            if answer is None:
                wire.shutdown(socket.SHUT_RDWR)
            else:
                theirs.send({"event": "loaded", **answer})
            return loading.result(30)

    assert load({"checksum": "a hash"}) == ("weights", "a hash")
    with pytest.raises(CheckpointError, match="^rank 1: new: model.safetensors is cut off$"):
        load({"why": "new: model.safetensors is cut off"})
    with pytest.raises(CheckpointError, match="^rank 1: the files of new differ .hash b there, a "):
        load({"checksum": "b"})
    with pytest.raises(EngineFailed, match="a host was lost"):
        load(None)


DRAFTING = {  # as in test_methods_in_engines
    **{
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 80,
        "enable_prefix_caching": False,
    },
    **{"block_size": 4, "num_blocks": 21, "preemption_mode": "swap"},
    "speculative_config": {"method": "token_recycling", "num_speculative_tokens": 7, "tree": True},
}


@pytest.fixture(scope="module")
def draft_records(directory):
    """Returns what an engine tells that drafts, of two requests with the same text.

    The second begins in the middle of the first.
    """
    records: list[Any] = []
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with make_llm(directory, **DRAFTING) as llm:
        engine = llm._engine
        engine.events = HostRecorder(lambda record: records.append(json.loads(json.dumps(record))))
        engine.add("first", engine.prepare(None, (3, 4, 5), greedy))
        for _ in range(12):
            engine.step()
        engine.add("second", engine.prepare(None, (3, 4, 5), greedy))
        while engine.has_unfinished:
            engine.step()
        engine.events = Events()
    return records


def test_a_follower_takes_the_drafts_of_rank_0(draft_records, directory):
    assert sum(len(path) for record in draft_records for path in record.get("paths", ())) > 10, (
        "right ones"
    )
    assert all(record["draft_depth"] == 1 for record in draft_records if record["event"] == "plan")
    follow(directory, draft_records, **DRAFTING)


def test_other_drafts_are_seen_before_they_are_verified(draft_records, directory, monkeypatch):
    def others(engine: Any, plan: Any) -> Any:
        return {
            each: draft._replace(token_ids=draft.token_ids[::-1])
            for each, draft in drafts_of(engine, plan).items()
        }

    monkeypatch.setattr(replaying, "drafts_of", others)
    with pytest.raises(
        Differs, match=r"drafts\[0\] of its plan\n  rank 0: +\[1, .*\n  this rank: +\[1, "
    ):
        follow(directory, draft_records, **DRAFTING)


def test_rank_0_sees_who_is_gone_silent_or_of_another_mind():
    def lose_rank(act: Any) -> str:
        heard: list[BaseException] = []
        with greet() as (ours, theirs, wire):
            leader = Leader({1: ours}, 1.0)
            done = threading.Event()
            leader.start(lambda why: (heard.append(why), done.set()))
            act(theirs, wire)
            assert done.wait(10) and leader.has_lost
            leader._send({"event": "ping"})  # nobody is told twice
        (why,) = heard
        assert isinstance(why, HostLost)
        return str(why)

    assert lose_rank(lambda theirs, wire: wire.shutdown(socket.SHUT_RDWR)).startswith(
        "rank 1 is gone"
    )
    assert lose_rank(lambda theirs, wire: None) == "rank 1 has not answered for 1 s"
    different = {"event": "differs", "difference": "First difference: step 3"}
    assert "First difference: step 3" in lose_rank(lambda theirs, wire: theirs.send(different))


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_step_that_fails_names_the_host_that_is_gone(is_gone):
    """The device may know before the connection."""
    with greet() as (ours, _, wire):
        leader = Leader({1: ours}, 30.0)
        leader.start(lambda why: None)
        timer = threading.Timer(0.2, wire.shutdown if is_gone else int, (socket.SHUT_RDWR,))
        timer.start()
        why = "rank 1 is gone" if is_gone else "step 3 failed: RuntimeError: reset by peer"
        with pytest.raises(HostLost, match=f"^{why}"):
            leader.failed(SimpleNamespace(step_id=3), RuntimeError("reset by peer"))  # type: ignore[arg-type]
        timer.join()


# ---- two processes

SETTINGS = {
    **{
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 18,
        "max_model_len": 60,
    },
    **{"dtype": "float32", "preemption_mode": "swap"},
}
PROMPTS = [[(7 * i + 3) % 250 + 1 for i in range(length)] for length in (41, 17)]
REQUESTED: dict[str, Any] = {
    "max_tokens": 16,
    "temperature": 0.9,
    "seed": 3,
    "ignore_eos": True,
    "logprobs": 1,
}


def free_ports() -> int:
    """Returns the first of two ports that nobody has, below those that the system gives to
    connections.
    """
    for port in random.Random(os.getpid()).sample(range(20_000, 30_000), 100):
        first, second = ("127.0.0.1", port), ("127.0.0.1", port + 1)
        with (
            contextlib.suppress(OSError),
            socket.create_server(first),
            socket.create_server(second),
        ):
            return port
    raise AssertionError("no ports are free")


class Host:
    def __init__(
        self, model: Path, port: int, rank: int, secret: bytes = SECRET, *words: str
    ) -> None:
        flags = [
            word
            for name, value in SETTINGS.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        hosts = ["--num-hosts", "2", "--host-rank", str(rank), "--coordinator", f"127.0.0.1:{port}"]
        command = [sys.executable, "-m", "jaxpage", "serve", str(model), *flags, *hosts]
        command += [
            "--tensor-parallel-size",
            "2",
            "--host-timeout-seconds",
            "30",
            "--port",
            "0",
            *words,
        ]
        environment = {**os.environ, "JAXPAGE_HOSTS_SECRET": secret.decode()}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def wait_for(self, pattern: str, seconds: float = 240) -> str:
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.said)):
            assert self._reader.is_alive() and time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return match[0]

    def wait_for_end(self, seconds: float = 120) -> int:
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status


@contextlib.contextmanager
def start_process(*arguments: Any) -> Iterator[Host]:
    host = Host(*arguments)
    try:
        yield host
    finally:
        host.process.kill()
        host.wait_for_end()
        assert host.process.stderr is not None
        host.process.stderr.close()


def reference(
    directory: Path, lora: LoRARequest | None = None, **requested: Any
) -> list[tuple[list[int], list[float]]]:
    """Returns the outputs of one process."""
    params = SamplingParams(**{**REQUESTED, **requested})
    settings = {
        **SETTINGS,
        "tensor_parallel_reduction": "invariant",
        "enable_lora": lora is not None,
    }
    with LLM(str(directory), **settings, use_tqdm=False) as llm:
        outputs = [
            llm.generate(prompt, params, use_tqdm=False, lora_request=lora)[0] for prompt in PROMPTS
        ]
    return [
        (
            sample.token_ids,
            [
                entries[token].logprob
                for token, entries in zip(sample.token_ids, sample.logprobs, strict=True)
            ],
        )
        for output in outputs
        for sample in output.outputs
    ]


def answers_of(url: str, **requested: Any) -> list[tuple[list[int], list[float]]]:
    body = {"model": "m", "prompt": PROMPTS, **REQUESTED, "return_token_ids": True, **requested}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    return [
        (choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]
    ]


JOINS = """
import os, signal, sys, time
from jaxpage.serving.hosts.processes import join_processes
rank = int(sys.argv[2])
join_processes(sys.argv[1], 2, rank, 120, 10)
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)  # or JAX may end rank 1, which may join later, before it ends itself
sys.exit("rank 1 has ended")
"""


def test_rank_0_whose_start_fails_does_not_wait_for_the_host_that_is_gone():
    address = f"127.0.0.1:{free_ports()}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", JOINS, address, rank], stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    said = [process.communicate(timeout=180)[1] for process in both]
    assert [process.returncode for process in both] == [1, -signal.SIGKILL], said
    assert said[0].endswith("rank 1 has ended\n"), "and nothing of JAX after it"


# half a minute of processes that wait for each other, on a machine that may be busy
@pytest.mark.sweep
def test_two_processes_serve_what_one_computes_until_one_is_killed(directory, tmp_path):
    other = random_checkpoint(tmp_path / "other", LLAMA, seed=1)
    port = free_ports()
    with (
        start_process(directory, port, 0, SECRET, "--served-model-name", "m") as leader,
        start_process(directory, port, 1, b"a secret of somebody else") as stranger,
        start_process(other, port, 1) as mistaken,
    ):
        assert stranger.wait_for_end() == 1 and "the secret is another one" in stranger.said
        assert mistaken.wait_for_end() == 1 and re.search(
            "refuses this rank: the files of the model differ", mistaken.said
        )
        with start_process(directory, port, 1) as follower:  # it joins late
            expected = reference(directory)  # compiled meanwhile
            url = leader.wait_for(r"http://[^\s/\"]+")
            assert answers_of(url) == expected, "to the last bit"
            swapped = re.search(
                r'^jaxpage.num_preemptions_total\S*mode="swap"\S* (\d+)',
                httpx.get(f"{url}/metrics").text,
                re.M,
            )
            assert swapped and int(swapped[1]) > 0
            refusal = httpx.post(f"{url}/v1/embeddings", json={"model": "m", "input": [1, 2]})
            assert refusal.status_code == 400 and "on 2 hosts" in refusal.text
            assert httpx.get(f"{url}/health").status_code == 200
            # or what is asked next would have ended before it is killed
            follower.process.send_signal(signal.SIGSTOP)
            with ThreadPoolExecutor(1) as pool:
                requested = pool.submit(
                    httpx.post,
                    f"{url}/v1/completions",
                    json={"model": "m", "prompt": [1]},
                    timeout=60,
                )
                time.sleep(3)  # the request is there by then, also on a busy machine
                follower.process.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                failed = requested.result()
            assert failed.status_code == 500 and "The engine has failed" in failed.text
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(f"{url}/health").status_code == 503
            assert leader.wait_for_end() == 1 and time.monotonic() - killed < 20
            assert "rank 1 is gone" in leader.said


@pytest.mark.sweep
def test_a_rank_that_hangs_is_seen_in_time(directory):
    """It is stopped while a request runs: the request ends with an error, health turns red, and so
    ends rank 1 when it goes on.
    """
    port, seconds = free_ports(), 8
    flags = [SECRET, "--host-timeout-seconds", str(seconds), "--served-model-name", "m"]
    flags += ["--max-model-len", "256", "--num-blocks", "70"]  # a request runs for a second or two
    with (
        start_process(directory, port, 0, *flags) as leader,
        start_process(directory, port, 1, *flags) as follower,
    ):
        url = leader.wait_for(r"http://[^\s/\"]+")
        body = {"model": "m", "prompt": PROMPTS[1], "max_tokens": 235, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}  # a chunk for each token
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines).removeprefix("data: "))["choices"], "it runs"
            follower.process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            assert httpx.get(f"{url}/health").status_code == 200, "nobody knows yet"
            output = "".join(lines)
            took = time.monotonic() - stopped
            assert httpx.get(f"{url}/health").status_code == 503
        assert "The engine has failed" in output, output
        assert seconds / 2 < took < 2 * seconds
        assert (
            leader.wait_for_end() == 1 and f"rank 1 has not answered for {seconds} s" in leader.said
        )
        follower.process.send_signal(signal.SIGCONT)
        assert follower.wait_for_end() != 0


@pytest.mark.sweep
def test_two_processes_draft_and_keep_a_log(directory, tmp_path):
    """The log of rank 0 is that of one process with two devices, weights included."""
    drafting = json.dumps({"method": "token_recycling", "num_speculative_tokens": 3, "tree": True})
    both, port, log = ["--speculative-config", drafting], free_ports(), tmp_path / "log"
    flags = [
        "--event-log",
        str(log),
        "--incident-steps",
        "99",
        "--incident-directory",
        str(tmp_path),
    ]
    flags += ["--incident-token-ids", "--served-model-name", "m"]
    with (
        start_process(directory, port, 0, SECRET, *both, *flags) as leader,
        start_process(directory, port, 1, SECRET, *both) as other,
    ):
        expected = reference(directory, temperature=0.0)
        url = leader.wait_for(r"http://[^\s/\"]+")
        assert [answers_of(url, temperature=0.0) for _ in range(2)] == [expected] * 2, (
            "to the last bit"
        )
        incident = httpx.post(f"{url}/debug/incident").raise_for_status().json()
        right = re.search(
            r"^jaxpage.spec_decode_num_accepted_tokens_total\S* (\d+)",
            httpx.get(f"{url}/metrics").text,
            re.M,
        )
        assert right and int(right[1]) > 10
        leader.process.terminate()
        assert (leader.wait_for_end(), other.wait_for_end()) == (0, 0)
    xla_flags = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
    for path in (log, tmp_path / incident["file"]):
        again = [sys.executable, "-m", "jaxpage", "replay", str(path)]
        said = subprocess.run(
            again, env={**os.environ, "XLA_FLAGS": xla_flags}, capture_output=True, text=True
        )
        assert said.returncode == 0, said.stdout + said.stderr


def random_adapter(directory: Path) -> Path:
    """Makes an adapter of layers that are divided along either side."""
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(2):
        for module, num_in in (("self_attn.q_proj", 64), ("mlp.down_proj", 160)):
            for name, shape in (("A", (4, num_in)), ("B", (64, 4))):
                tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{name}.weight"] = (
                    rng.normal(size=shape)
                )
    directory.mkdir()
    save_file(
        {name: array.astype(np.float32) for name, array in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 1,
        "target_modules": ["q_proj", "down_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.sweep
def test_two_processes_take_several_steps_at_once_with_an_adapter(directory, tmp_path):
    adapter, port = random_adapter(tmp_path / "adapter"), free_ports()
    both = ["--num-scheduler-steps", "4", "--enable-lora", "--lora-modules", f"one={adapter}"]
    with (
        start_process(directory, port, 0, SECRET, *both, "--served-model-name", "m") as leader,
        start_process(directory, port, 1, SECRET, *both) as other,
    ):
        plain = reference(directory)
        expected = reference(directory, LoRARequest("one", 1, str(adapter)))
        url = leader.wait_for(r"http://[^\s/\"]+")
        assert answers_of(url, model="one") == expected != plain, "to the last bit"
        assert answers_of(url) == plain
        steps = re.search(
            r"^jaxpage.engine_steps_total\S* (\d+)", httpx.get(f"{url}/metrics").text, re.M
        )
        assert steps and int(steps[1]) < 40, "fewer than tokens"
        leader.process.terminate()
        assert (leader.wait_for_end(), other.wait_for_end()) == (0, 0)


def run_updated_alone(
    llm: LLM, token_ids: list[int], params: SamplingParams, mode: Any, num_tokens: int, weights: Any
) -> tuple[list[int], list[float]]:
    """Returns what one process gives when its weights are replaced after that many tokens."""
    updates: list[Any] = []
    [request] = llm._prepare([token_ids], params)
    handle = Handle(request, updates.extend)
    llm._driver.add([handle])
    while (
        handle.reporter is None
        or handle.reporter._group.sequences[0].num_output_tokens < num_tokens
    ):
        llm._driver.step()
    llm.update_parameters(weights, mode=mode)
    while llm._driver.step():
        pass
    [(_, output)] = updates
    [sample] = output.outputs
    entries = zip(sample.token_ids, sample.logprobs, strict=True)
    return sample.token_ids, [logprobs[token].logprob for token, logprobs in entries]


@pytest.mark.sweep
def test_two_processes_take_other_weights_while_a_request_runs(directory, others, tmp_path):
    """They do as one process does; and where a host cannot, nothing has changed on either."""
    for rank in range(2):
        shutil.copytree(others, tmp_path / f"{rank}")
    for name in ("cut", "changed"):
        for rank in range(2):
            shutil.copytree(others / "new", tmp_path / f"{rank}" / name, dirs_exist_ok=True)
        file = tmp_path / "1" / name / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-64] if name == "cut" else whole[:-1] + b"\0")
    port = free_ports()
    sizes = {"max_model_len": 256, "num_blocks": 70}
    flags = [
        word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", f"{size}")
    ]
    of_rank = [[*flags, "--weights-directory", str(tmp_path / f"{rank}")] for rank in range(2)]
    params = {**REQUESTED, "max_tokens": 200}
    with (
        start_process(
            directory, port, 0, SECRET, "--served-model-name", "m", *of_rank[0]
        ) as leader,
        start_process(directory, port, 1, SECRET, *of_rank[1]) as follower,
        LLM(
            str(directory),
            **{**SETTINGS, **sizes, "tensor_parallel_reduction": "invariant"},
            use_tqdm=False,
            start=False,
        ) as alone,
    ):
        url = leader.wait_for(r"http://[^\s/\"]+")
        body = {"model": "m", "prompt": PROMPTS[1], **params, "stream": True}
        for version, (name, mode) in enumerate((("new", "keep"), ("newer", "recompute")), 1):
            stream = {**body, "return_token_ids": True}
            tokens: list[int] = []
            logprobs: list[float] = []
            versions: list[Any] = []
            with httpx.stream("POST", f"{url}/v1/completions", json=stream, timeout=120) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    if not tokens:
                        httpx.post(f"{url}/pause").raise_for_status()
                        update = {"path": name, "mode": mode}
                        taken = httpx.post(f"{url}/v1/update_weights", json=update, timeout=60)
                        assert taken.json() == {"weights_version": version}
                        httpx.post(f"{url}/resume").raise_for_status()
                    tokens += choice["token_ids"]
                    logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                    versions += choice["weights_versions"]
            num_old = sum(number for before, number in versions if before == version - 1)
            assert 0 < num_old < 200 and len(tokens) == 200
            expected = run_updated_alone(
                alone,
                PROMPTS[1],
                SamplingParams(**params),
                mode,
                num_old,
                load_file(others / name / "model.safetensors"),
            )
            assert (tokens, logprobs) == expected, "to the last bit"
        before = answers_of(url)
        for name, why in {
            "cut": "rank 1: .*model.safetensors",
            "changed": "rank 1: the files of changed differ",
            "nan": "rank 1: .*q_proj.weight.* has numbers that are NaN",
        }.items():
            refusal = httpx.post(f"{url}/v1/update_weights", json={"path": name}, timeout=60)
            assert refusal.status_code == 400 and re.search(why, refusal.text), refusal.text
            assert answers_of(url) == before
        for path in ("/reset_prefix_cache", "/pause", "/resume"):
            httpx.post(f"{url}{path}").raise_for_status()
        taken = httpx.post(f"{url}/v1/update_weights", json={"path": "new", "mode": "abort"})
        assert taken.json() == {"weights_version": 3} and answers_of(url) != before
        leader.process.terminate()
        assert (leader.wait_for_end(), follower.wait_for_end()) == (0, 0)
