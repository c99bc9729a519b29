"""Weights that come from memory and go back there: the same texts as from files, other texts after
an update, and nothing in between.
"""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig

from jaxpage import LLM, SamplingParams
from jaxpage.assembly import Built
from jaxpage.checkpoints import aliased_bytes, load_weights, loading
from jaxpage.checkpoints.in_memory import name_parameters, open_parameters, with_parameters
from jaxpage.device.hardware import make_mesh
from jaxpage.errors import CheckpointError, ConfigError, UnsupportedError
from jaxpage.serving.settings.resolving import resolve_both
from tests.support.engines import BLOCKS_OF_16, LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.running import Running, metrics, serving, wait_until

SETTINGS: dict[str, Any] = {**BLOCKS_OF_16, "preemption_mode": "recompute"}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 1,
    "vocab_size": 99,
}
PROMPTS = [[1, 2, 3, 4] * 12, [7, 8, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def texts(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs]


@pytest.fixture(scope="module")
def from_files(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Returns the texts of two sets of weights."""
    arrays = []
    for seed in (0, 1):
        with make_llm(
            random_checkpoint(tmp_path_factory.mktemp("m") / "m", LLAMA, seed=seed)
        ) as llm:
            arrays.append(texts(llm))
    assert arrays[0] != arrays[1]
    return arrays


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM.from_parameters(LLAMA, random_tensors(LLAMA), **SETTINGS) as made:
        yield made


def nest(tensors: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *parents, last = name.split(".")
        place = tree
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return tree


def test_weights_go_in_and_come_back_and_are_replaced(
    llm: LLM, from_files: list[list[Any]]
) -> None:
    assert texts(llm) == from_files[0]
    back = llm.parameters()
    for name, array in random_tensors(LLAMA).items():
        np.testing.assert_array_equal(np.asarray(back.pop(name)), array)
    assert not back
    other = nest(
        {name: jnp.asarray(array) for name, array in random_tensors(LLAMA, seed=1).items()}
    )
    llm.update_parameters(other)  # compiles what joins arrays on their devices, for each shape
    llm.update_parameters(random_tensors(LLAMA))
    compiled = llm.stats()["compile_total"]
    checksum = llm.weights_checksum()
    version = llm.update_parameters(other)
    assert llm.weights_checksum() != checksum
    assert texts(llm) == from_files[1], "neither the old weights nor what was cached of them"
    assert llm.generate([[1]], GREEDY, use_tqdm=False)[0].weights_version == version
    assert (
        llm.update_parameters(random_tensors(LLAMA)) == version + 1 and texts(llm) == from_files[0]
    )
    assert llm.weights_checksum() == checksum
    assert llm.stats()["compile_total"] == compiled


class NoHostCopies:
    """numpy, but that an array of JAX is not read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, array: Any, *others: Any) -> Any:
        assert not isinstance(array, jax.Array), "it comes to the host"
        return np.asarray(array, *others)


FAMILIES = pytest.mark.parametrize(
    "config", [LLAMA, MIXTRAL, GPT2], ids=lambda config: config["model_type"]
)


def bits_of(array: Any) -> Any:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


@FAMILIES
def test_arrays_on_devices_are_joined_there(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked, transposed and converted, with the bits that they get on the host.

    JAX itself lets no array of the host in.
    """
    tensors = random_tensors(config)
    for array in tensors.values():  # numbers that conversions round, and those that they flush
        array.reshape(-1)[:6] = [1e-39, -1e-41, 6e4, 1 + 2**-8, -0.0, 6e-8]
    on_host = open_parameters(config, tensors)
    arrays = {name: jnp.asarray(array) for name, array in tensors.items()}
    on_device = with_parameters(on_host, arrays)
    for dtype in ("float32", "bfloat16", "float16"):
        expected = load_weights(on_host.plan, dtype, lambda array: array)
        with monkeypatch.context() as patch, jax.transfer_guard_host_to_device("disallow_explicit"):
            patch.setattr(loading, "np", NoHostCopies())
            made = load_weights(on_device.plan, dtype, lambda array: array)
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                load_weights(on_host.plan, dtype, jnp.asarray)
        leaves = jax.tree.leaves(made)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        pairs = zip(map(bits_of, leaves), map(bits_of, jax.tree.leaves(expected)), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)
        pointers = {array.unsafe_buffer_pointer() for array in arrays.values()}
        assert pointers.isdisjoint(leaf.unsafe_buffer_pointer() for leaf in leaves)


@FAMILIES
def test_a_module_does_not_come_to_the_host(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the numbers of the same tensors by name, and shares no array with its owner."""
    files = open_parameters(config, random_tensors(config))
    module = files.family.Model(files.spec, dtype="float32")
    nnx.update(module, load_weights(files.plan, "float32", jnp.asarray))
    expected = load_weights(files.plan, "float32", lambda array: array)
    stored = with_parameters(files, module)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "np", NoHostCopies())
        weights = load_weights(stored.plan, "float32", lambda array: array)
    named = name_parameters(stored.plan, weights)
    for array in jax.tree.leaves(nnx.to_pure_dict(nnx.state(module))):
        array.delete()  # as a trainer that donates them does
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    assert named.keys() == random_tensors(config).keys()


def test_arrays_that_need_no_change_can_be_used_as_they_are(from_files: list[list[Any]]) -> None:
    """The engine has the owner's buffers, as far as kernels want no panels, and deletes none.

    Arrays that are joined or converted are made anew.
    """
    tensors = random_tensors(LLAMA)
    files = open_parameters(LLAMA, tensors)
    module = files.family.Model(files.spec, dtype="float32")
    nnx.update(module, load_weights(files.plan, "float32", jnp.asarray))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module)))
    plan = open_parameters(LLAMA, module, may_alias=True).plan

    def pointers(arrays: Any) -> set[int]:
        return {array.unsafe_buffer_pointer() for array in jax.tree.leaves(arrays)}

    put = make_mesh().put
    assert pointers(load_weights(plan, "float32", put)) == pointers(leaves)
    assert pointers(leaves).isdisjoint(pointers(load_weights(plan, "bfloat16", put)))
    with LLM.from_parameters(LLAMA, module, may_alias=True, **SETTINGS) as llm:
        used = llm._engine.runner.share_parameters()["target"]
        norms = pointers(leaves) & pointers(used)
        assert len(norms) == 2 * LLAMA["num_hidden_layers"] + 1
        assert texts(llm) == from_files[0]
        llm.sleep()
    assert not any(leaf.is_deleted() for leaf in leaves)
    arrays = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    plan = open_parameters(LLAMA, arrays, may_alias=True).plan
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    alone = [array for name, array in arrays.items() if not any(each in name for each in joined)]
    device = jax.devices()[0]
    assert aliased_bytes(plan, "float32", device) == sum(array.nbytes for array in alone)
    assert aliased_bytes(plan, "bfloat16", device) == aliased_bytes(plan, "float32", None) == 0


def test_arrays_are_free_when_their_owner_drops_them() -> None:
    """So a model that goes to sleep cannot read them again."""

    def refer(arrays: dict[str, Any]) -> list[weakref.ref[Any]]:
        return [weakref.ref(array) for array in arrays.values()]

    arrays = {name: jnp.asarray(array) for name, array in random_tensors(LLAMA).items()}
    others = random_tensors(LLAMA, seed=1)
    with LLM.from_parameters(LLAMA, arrays, **SETTINGS) as llm:
        references = refer(arrays)
        del arrays
        llm.update_parameters(others)
        references += refer(others)
        del others
        gc.collect()
        assert not any(each() is not None for each in references)
        before = texts(llm)
        with pytest.raises(UnsupportedError, match="level 1 keeps them"):
            llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        assert texts(llm) == before


def test_a_module_serves(llm: LLM, from_files: list[list[Any]]) -> None:
    files = open_parameters(LLAMA, random_tensors(LLAMA, seed=1))
    module = files.family.Model(files.spec, dtype="float32")
    with pytest.raises(CheckpointError, match=r"1 problem\):\n  - the model has no arrays yet$"):
        llm.update_parameters(module)
    tree = load_weights(files.plan, "float32", jnp.asarray)
    with pytest.raises(
        CheckpointError,
        match=r"1 problem\):\n  - these are parameters as TrainableModel.load .*named",
    ):
        llm.update_parameters(tree)
    nnx.update(module, tree)
    compiled = llm.stats()["compile_total"]
    llm.update_parameters(module)
    assert texts(llm) == from_files[1] and llm.stats()["compile_total"] == compiled
    with pytest.raises(UnsupportedError, match="a module cannot be quantised"):
        LLM.from_parameters(LLAMA, module, quantization="int8")
    with LLM.from_parameters(LLAMA, module, **SETTINGS) as made:
        assert texts(made) == from_files[1]
        for name, array in random_tensors(LLAMA, seed=1).items():
            np.testing.assert_array_equal(made.parameters()[name], array)


def test_requests_that_run_are_ended_where_that_is_requested(
    by_hand: None, llm: LLM, from_files: list[list[Any]]
) -> None:
    version = llm.update_parameters(random_tensors(LLAMA))
    stream = llm.stream(PROMPTS[0], GREEDY)
    token_ids = list(next(stream).outputs[0].token_ids)
    assert llm.update_parameters(random_tensors(LLAMA, seed=1), mode="abort") == version + 1
    last = next(stream)
    token_ids += last.outputs[0].token_ids
    assert last.outputs[0].finish_reason == "abort" and last.weights_version == version
    assert token_ids == from_files[0][0][0][: len(token_ids)] and len(token_ids) < 12
    assert texts(llm) == from_files[1] and not list(stream)
    with pytest.raises(
        ValueError, match="mode must be one of wait, abort, keep, recompute, not 'now'"
    ):
        llm.update_parameters(random_tensors(LLAMA), mode="now")  # type: ignore[arg-type]
    invariants(llm)


def test_what_does_not_fit_leaves_the_old_weights_in_use(
    llm: LLM, from_files: list[list[Any]]
) -> None:
    version = llm.update_parameters(random_tensors(LLAMA))
    wrong = random_tensors(LLAMA, seed=1)
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:5]
    wrong["model.layers.0.mlp.up_proj.weight"] = wrong["model.layers.0.mlp.up_proj.weight"].astype(
        np.float64
    )
    gone = wrong["model.layers.0.mlp.down_proj.weight"] = jnp.zeros((64, 64))
    gone.delete()
    wrong["extra"] = np.zeros(3, np.float32)
    del wrong["lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        llm.update_parameters(wrong)
    for text in (
        "(5 problems)",
        "'model.norm.weight' has shape (5,)",
        "'model.layers.0.mlp.up_proj.weight' has dtype float64",
        "'model.layers.0.mlp.down_proj.weight' was deleted or donated: its numbers are gone",
        "'extra' of shape (3,) is unexpected",
    ):
        assert text in str(caught.value)
    assert "tensor 'lm_head.weight' of shape (257, 64) is missing" in str(caught.value)
    infinite = random_tensors(LLAMA, seed=1)
    infinite["model.layers.0.self_attn.k_proj.weight"][3] = np.inf
    with pytest.raises(
        CheckpointError,
        match=r"1 problem\):\n  - '.*0.self_attn.k_proj.weight' has numbers that are NaN or",
    ):
        llm.update_parameters(infinite, check_finite=True)
    assert llm.update_parameters(random_tensors(LLAMA), check_finite=True) == version + 1
    for wrong_value in (None, 3, [("model.norm.weight", wrong["model.norm.weight"])]):
        with pytest.raises(
            TypeError,
            match="parameters must be a dict of arrays by name, or a module of Flax NNX; got",
        ):
            llm.update_parameters(wrong_value)  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError,
        match=r"1 problem\):\n  - 'model.norm.weight' is a list, and no array of numpy or JAX",
    ):
        llm.update_parameters({**random_tensors(LLAMA), "model.norm.weight": [1.0] * 64})
    assert (
        texts(llm) == from_files[0] and llm.update_parameters(random_tensors(LLAMA)) == version + 2
    )


def test_a_config_of_transformers_is_one() -> None:
    actual, expected = (
        open_parameters(config, random_tensors(LLAMA)) for config in (LlamaConfig(**LLAMA), LLAMA)
    )
    assert actual.spec == expected.spec
    for wrong in (None, "config.json", [LLAMA]):
        with pytest.raises(
            TypeError,
            match="config must be a dict, as config.json is, or a config of transformers; got",
        ):
            LLM.from_parameters(wrong, random_tensors(LLAMA))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="tokenizer must be a tokenizer of transformers .*, or a directory; got 42"
    ):
        LLM.from_parameters(LLAMA, random_tensors(LLAMA), tokenizer=42)
    with pytest.raises(
        TypeError,
        match="from_parameters takes no model: the config and the parameters are the model",
    ):
        LLM.from_parameters(LLAMA, random_tensors(LLAMA), model="demo")  # type: ignore[call-arg]


def test_a_pinned_prefix_and_a_log_and_quantised_weights_are_refused(
    llm: LLM, tmp_path: Path
) -> None:
    pinned = llm.pin_prefix([5] * 20)
    with pytest.raises(RuntimeError, match=r"prefixes of the old ones are pinned \(1\)"):
        llm.update_parameters(random_tensors(LLAMA))
    pinned.release()
    with pytest.raises(
        UnsupportedError, match="event_log needs event_log_weights=True with from_p"
    ):
        LLM.from_parameters(LLAMA, random_tensors(LLAMA), event_log=str(tmp_path / "log"))
    with make_llm(random_checkpoint(tmp_path, LLAMA), quantization="int8") as quantized:
        for call in (quantized.parameters, lambda: quantized.update_parameters({})):
            with pytest.raises(
                UnsupportedError,
                match=r"not supported for quantised weights \(int8 weights and inputs",
            ):
                call()


# The server


@pytest.fixture
def server(llm: LLM, tmp_path: Path) -> Iterator[tuple[Running, httpx.Client, Path]]:
    """Has the weights of seed 0, and a directory with those of seeds 0 and 1."""
    llm.update_parameters(random_tensors(LLAMA))
    for seed in (0, 1):
        random_checkpoint(tmp_path / "w" / str(seed), LLAMA, seed=seed)
    built = Built(llm._engine, None, {}, llm.spec, llm._model)
    with serving(built, weights_directory=str(tmp_path / "w")) as server:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            assert "/v1/update_weights" in client.get("/").json()["paths"]
            yield server, client, tmp_path / "w"
        assert not server.errors


def request(**fields: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return {"model": "demo", "prompt": PROMPTS[0], **greedy, **fields}


def token_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def test_the_server_takes_other_weights(server: Any, from_files: list[list[Any]]) -> None:
    running, client, directory = server
    old, new = from_files[0][0][0], from_files[1][0][0]
    version = running.engine.weights_version
    before, compiled = (
        client.post("/v1/completions", json=request()),
        metrics(client)["jaxpage_compile_total"],
    )
    assert token_ids(before) == old
    (directory / "1" / "config.json").unlink()  # a trainer may write weights alone
    answer = client.post("/v1/update_weights", json={"path": "1"})
    assert (answer.status_code, answer.json()) == (200, {"weights_version": version + 1})
    after = client.post("/v1/completions", json=request())
    assert token_ids(after) == new, "neither the old weights nor what was cached of them"
    fingerprint = before.json()["system_fingerprint"].rpartition("-")[0]
    assert after.json()["system_fingerprint"] == f"{fingerprint}-{version + 1}"
    assert client.post("/v1/update_weights", json={"path": "0", "mode": "abort"}).status_code == 200
    assert token_ids(client.post("/v1/completions", json=request())) == old
    assert metrics(client)["jaxpage_compile_total"] == compiled


def test_the_server_is_paused_while_its_weights_change(server: Any) -> None:
    """The request goes on with the new ones, and says which weights drew which of its tokens."""
    running, client, _ = server
    version = running.engine.weights_version
    for path in ("/pause", "/pause?mode=keep"):
        answer = client.post(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
    assert client.get("/is_paused").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/v1/completions", json=request())
        wait_until(lambda: running.engine.has_unfinished, "the request is there")
        waiting = client.post("/v1/update_weights", json={"path": "1"})
        assert waiting.status_code == 409 and "paused with 1 of them" in waiting.text
        update = client.post("/v1/update_weights", json={"path": "1", "mode": "recompute"})
        assert update.json() == {"weights_version": version + 1}
        assert client.get("/health").status_code == 200 and not first.done()
        assert client.post("/resume").json() == {"status": "resumed"}
        [choice] = first.result().json()["choices"]
    assert choice["weights_versions"] == [[version + 1, 12]]
    assert client.get("/is_paused").json() == {"is_paused": False}
    again = client.post("/resume")
    assert again.status_code == 409 and "the engine is not paused" in again.text
    for path in ("/pause?mode=abort", "/pause?clear=1", "/resume?mode=keep"):
        assert client.post(path).status_code == 400, path
    foreign = client.post("/pause", headers={"Origin": "http://elsewhere"})
    assert foreign.status_code == 403 and not running.loop.is_paused


def test_a_stream_says_which_weights_drew_its_tokens(server: Any) -> None:
    running, client, _ = server
    version = running.engine.weights_version
    versions: list[int] = []
    has_paused = threading.Event()

    def pause_in_the_middle(commands_wait: Callable[[], bool]) -> bool:
        if running.engine.num_steps < num_steps + 8 or has_paused.is_set():
            return True
        running.loop.pause()
        has_paused.set()
        return False

    num_steps = running.engine.num_steps
    running.loop.before_step = pause_in_the_middle
    body = request(stream=True)
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert has_paused.wait(60)
        update = {"path": "1", "mode": "keep"}
        assert httpx.post(f"{running.address}/v1/update_weights", json=update).is_success
        assert httpx.post(f"{running.address}/resume").is_success
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                for number, count in choice["weights_versions"]:
                    versions += [number] * count
                assert len(choice["token_ids"]) == sum(n for _, n in choice["weights_versions"])
    running.loop.before_step = None
    assert len(versions) == 12 and {*versions} == {version, version + 1}
    assert versions == sorted(versions)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_that_run_are_waited_for_or_ended(
    server: Any, from_files: list[list[Any]], mode: str
) -> None:
    """One that comes meanwhile waits, and has the new weights.

    The engine is held until all three have come, in order.
    """
    running, _, _ = server
    holds, held = threading.Event(), threading.Event()

    def hold(engine: Any) -> None:
        holds.set()
        held.wait(60)

    running.loop.call(hold)
    assert holds.wait(60)  # what waits from here on are the requests
    with ThreadPoolExecutor(3) as pool:

        def post(path: str, place: int, body: dict[str, Any]) -> Any:
            answer = pool.submit(lambda: httpx.post(running.address + path, json=body, timeout=60))
            wait_until(lambda: running.loop.turns.inbox.qsize() == place, "the engine has it")
            return answer

        first = post("/v1/completions", 1, request())
        update = post("/v1/update_weights", 2, {"path": "1", "mode": mode})
        second = post("/v1/completions", 3, request())
        held.set()
        assert (
            update.result().status_code == 200 and token_ids(second.result()) == from_files[1][0][0]
        )
        if mode == "wait":
            assert token_ids(first.result()) == from_files[0][0][0]
        else:
            assert (
                first.result().status_code == 503
                and first.result().json()["error"]["code"] == "weights_replaced"
            )


def test_who_leaves_while_waiting_takes_the_update_back(
    server: Any, from_files: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is refused meanwhile."""
    running, client, _ = server
    version, run = running.engine.weights_version, running.engine.runner.run
    monkeypatch.setattr(
        running.engine.runner, "run", lambda batch: (time.sleep(0.1), run(batch))[1]
    )
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: client.post("/v1/completions", json=request()))
        wait_until(lambda: running.engine.has_unfinished, "it runs")
        update = pool.submit(
            lambda: httpx.post(
                f"{running.address}/v1/update_weights", json={"path": "1"}, timeout=0.5
            )
        )
        wait_until(lambda: running.loop.turns.change is not None, "it waits")
        again = client.post("/v1/update_weights", json={"path": "1"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
        with pytest.raises(httpx.ReadTimeout):
            update.result()
        assert token_ids(first.result()) == from_files[0][0][0]
    wait_until(lambda: running.loop.turns.change is None, "nothing waits")
    assert token_ids(client.post("/v1/completions", json=request())) == from_files[0][0][0]
    assert running.engine.weights_version == version


def test_weights_that_do_not_fit_are_refused_with_all_that_is_wrong(
    server: Any, from_files: list[list[Any]]
) -> None:
    running, client, directory = server
    version, wrong = running.engine.weights_version, directory / "wrong"
    shutil.copytree(directory / "1", wrong)
    tensors = load_file(wrong / "model.safetensors")
    names = [name for name in tensors if "layers" in name]
    save_file(
        {name: array[:1] if name in names else array for name, array in tensors.items()},
        wrong / "model.safetensors",
    )
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(
        json.dumps({**config, "rope_theta": 77.0, "transformers_version": "5"})
    )
    answer = client.post("/v1/update_weights", json={"path": "wrong"})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert all(f"'{name}' has shape" in message for name in names)
    assert message.count("config.json") == 1, "what decides nothing is not named"
    assert (
        "config.json: rope_theta is 77.0 here, and missing in the model that is served" in message
    )
    assert str(directory) not in message
    not_finite = {**load_file(directory / "1" / "model.safetensors")}
    not_finite[names[0]] = np.full_like(not_finite[names[0]], np.nan)
    save_file(not_finite, wrong / "model.safetensors")
    shutil.copy(directory / "0" / "config.json", wrong / "config.json")
    answer = client.post("/v1/update_weights", json={"path": "wrong"})
    assert (
        answer.status_code == 400
        and f"1 problem):\\n  - '{names[0]}' has numbers that are NaN" in answer.text
    )
    refusals = set()
    (directory / "link").symlink_to(directory.parent)
    for path in ("../w/../..", "link", "gone", "/etc", "a\0b", "1/config.json"):
        answer = client.post("/v1/update_weights", json={"path": path})
        refusals.add((answer.status_code, answer.json()["error"]["message"]))
    assert refusals == {(404, "There is no such directory below weights_directory")}
    for body, param in (
        ({}, "path"),
        ({"path": 3}, "path"),
        ({"path": "1", "mode": "now"}, "mode"),
        ({"path": "1", "check_finite": 1}, "check_finite"),
        ({"pth": "1"}, "body"),
    ):
        answer = client.post("/v1/update_weights", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    foreign = client.post(
        "/v1/update_weights", json={"path": "1"}, headers={"Origin": "http://elsewhere"}
    )
    assert foreign.status_code == 403
    assert token_ids(client.post("/v1/completions", json=request())) == from_files[0][0][0]
    assert running.engine.weights_version == version


def test_a_directory_of_weights_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights_directory: .*gone' is not a directory"):
        resolve_both(None, {}, {"weights_directory": str(tmp_path / "gone")}, environment={})


def test_weights_that_their_owner_gave_away_are_an_error(tmp_path: Path) -> None:
    with make_llm(random_checkpoint(tmp_path, LLAMA)) as llm:
        copies = {name: np.asarray(array).copy() for name, array in llm.parameters().items()}
        score = llm.score([1, 2, 3], [4, 5])
        # as a function that donates its arguments does
        llm.parameters()["model.norm.weight"].delete()
        with pytest.raises(RuntimeError, match="the engine failed during scoring"):
            llm.score([1, 2, 3], [4, 5])
        llm.update_parameters(copies)
        assert llm.score([1, 2, 3], [4, 5]) == score


def test_a_server_takes_other_weights_only_where_it_has_a_directory_of_them(llm: LLM) -> None:
    resolve_both(None, {"event_log": "x"}, {"weights_directory": "."}, environment={})
    with serving(Built(llm._engine, None, {}, llm.spec, llm._model)) as running:
        for path in ("/v1/update_weights", "/pause", "/resume"):
            assert httpx.post(f"{running.address}{path}", json={}).status_code == 404
        assert "--weights-directory" in httpx.post(f"{running.address}/pause").text
