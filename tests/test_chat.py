"""`jaxpage chat`: commands and turns of a conversation without a terminal, lines of a pipe, and
keys in a pseudo-terminal.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxpage import cli
from jaxpage.assembly import chat_defaults
from jaxpage.cli.chat import Lines, converse
from jaxpage.cli.conversation import COMMANDS, Conversation, is_open, unquote
from jaxpage.cli.line_editor import open_history
from jaxpage.cli.resolving import say
from jaxpage.errors import CapacityError
from jaxpage.outputs import CompletionOutput, RequestOutput
from tests.support.fake_llm import FakeLLM
from tests.support.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, READY, UP, terminal

ROOT = Path(__file__).parents[1]
YELLOW = ROOT / "examples" / "pictures" / "yellow.png"


def conversation(*turns: str, **settings: Any) -> Conversation:
    made = Conversation(settings.pop("sampling", {}), **settings)
    made.turns += [(text, f"answer to {text}") for text in turns]
    return made


# ---- commands


def test_the_messages_are_those_of_the_turns():
    talk = conversation("a", system="Be brief")
    system, user = {"role": "system", "content": "Be brief"}, {"role": "user", "content": "b"}
    assert talk.messages("b") == [
        system,
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "answer to a"},
        user,
    ]
    assert talk.messages("b", num_dropped=1) == [system, user]
    assert conversation().messages("b") == [user]


def test_help_lists_every_command():
    lines = conversation().command("/help").splitlines()
    assert [line.split()[0] for line in lines[: len(COMMANDS)]] == list(COMMANDS)
    assert {"/help", "/system", "/set", "/save", "/load", "/image", "/reset", "/exit"} == set(
        COMMANDS
    )


def test_pictures_are_shown_with_the_next_question(tmp_path):
    talk = conversation("a")
    path = tmp_path / "a b.png"
    assert "is no file" in talk.command(f"/image {path}")
    path.write_bytes(b"x")
    assert "is no PNG, JPEG, WebP or GIF file" in talk.command(f"/image {path}")
    path.write_bytes(YELLOW.read_bytes())
    assert talk.command(f"/image {path}") == "The next question has 1 picture"
    assert talk.command(f"/image {path}") == "The next question has 2 pictures"
    picture = {"type": "image", "image": str(path)}
    content = [picture, picture, {"type": "text", "text": "b"}]
    assert talk.messages("b")[-1] == {"role": "user", "content": content}
    talk.add_turn("b", "two")
    assert talk.messages("c")[2:] == [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "c"},
    ]
    assert "with pictures cannot be saved" in talk.command(f"/save {tmp_path / 'saved'}")
    talk.command(f"/image {path}")
    talk.command("/reset")
    assert talk.messages("d") == [{"role": "user", "content": "d"}]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/hlp", "did you mean /help?"),
        ("/rest", "did you mean /reset?"),
        ("/Exit", "did you mean /exit?"),
        ("/usr/bin/env", "there are /help /system /set"),
        ("/* a comment */", "there are /help"),
        ("/", "there are /help"),
    ],
)
def test_an_unknown_command_is_reported_and_changes_nothing(line, hint):
    talk = conversation("a")
    message = talk.command(line)
    assert hint in message and "Nothing was sent" in message
    assert len(talk.turns) == 1 and not talk.has_ended


def test_the_system_message_is_set_and_removed():
    talk = conversation("a")
    talk.command("/system  Be  brief ")
    assert talk.system == "Be  brief" and len(talk.turns) == 1
    talk.command("/reset")
    assert talk.messages() == [{"role": "system", "content": "Be  brief"}]
    assert "no system message" in talk.command("/system") and talk.messages() == []


def test_parameters_are_set_one_by_one():
    talk = conversation(sampling={"max_tokens": 200}, defaults={"temperature": 0.7, "top_p": 0.9})
    assert (talk.params.temperature, talk.params.top_p, talk.params.max_tokens) == (
        0.7,
        0.9,
        200,
    )
    for line in (
        "/set temperature 0",
        "/set max-tokens 5",
        "/set seed 3",
        "/set stop The end",
        "/set ignore_eos true",
    ):
        assert " = " in talk.command(line), line
    assert talk.command("/set stop_token_ids [1, 2]") == "stop_token_ids = [1, 2]"
    assert talk.command('/set structured_outputs {"regex": "a+"}').startswith(
        "structured_outputs = "
    )
    params = talk.params
    assert (params.temperature, params.max_tokens, params.seed, params.stop) == (
        0,
        5,
        3,
        ("The end",),
    )
    assert (
        params.ignore_eos
        and params.stop_token_ids == (1, 2)
        and params.structured_outputs == ("regex", '"a+"')
    )
    assert "temperature = 0.0\n" in talk.command("/set") and "top_p = 0.9" in talk.command("/set")
    talk.command("/set seed none")
    assert talk.params.seed is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperatur 1", "unknown parameter 'temperatur'; did you mean temperature?"),
        ("/set zebra 1", "unknown parameter 'zebra'; max_tokens, "),
        ("/set n 2", "unknown parameter 'n'"),  # one text is printed
        ("/set temperature", "temperature takes a value"),
        ("/set temperature 3", "temperature must be a finite number from 0 to 2, got 3"),
        ("/set temperature hot", "temperature must be a finite number from 0 to 2, got 'hot'"),
        ("/set top_p [", "cannot be read as a value"),
        ("/set structured_outputs a+", "not a JSON object: 'a+'"),
        ("/set seed 1.5", "seed must be"),
    ],
)
def test_a_wrong_parameter_is_reported_and_changes_nothing(line, message):
    talk = conversation(sampling={"temperature": 0.5})
    assert message in talk.command(line)
    assert talk.params == conversation(sampling={"temperature": 0.5}).params


def test_a_conversation_is_saved_and_loaded(tmp_path):
    path = tmp_path / "talk.json"
    talk = conversation("a", "ü\n", system="Be brief")
    assert talk.command(f"/save {path}") == f"Written to {path}"
    assert json.loads(path.read_text())["messages"] == talk.messages()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    talk.turns.pop()
    assert talk.command(f"/save {path}") == f"Written to {path}", (
        "its own file may be written again"
    )
    other = conversation("b")
    assert other.command(f"/load {path}") == f"1 turns from {path}, and a system message"
    assert other.messages() == talk.messages()
    path.write_text(json.dumps(talk.messages()[1:]))
    assert other.command(f"/load {path}") == f"1 turns from {path}", (
        "a list of messages is one, too"
    )
    assert other.system is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (
            '[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": ""}]',
            "is not JSON",
        ),
        ("{}", "has no messages"),
        ('[{"role": "user"}]', "has no messages"),
        ('[{"role": "user", "content": "a"}]', "must take turns, the user first; it has user"),
        (
            '[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]',
            "must take turns",
        ),
    ],
)
def test_what_is_no_conversation_is_neither_loaded_nor_overwritten(tmp_path, content, message):
    path = tmp_path / "other.json"
    path.write_text(content)
    talk = conversation("a", system="Be brief")
    before = talk.messages()
    assert message in talk.command(f"/load {path}") and talk.messages() == before
    assert (
        "is not a conversation; give another name" in talk.command(f"/save {path}")
        and path.read_text() == content
    )


def test_files_that_cannot_be_had_are_reported(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for command in ("/load", "/save"):
        assert "give the name of a file" in conversation().command(command)
        for name in ("pipe", "no/such/directory", "\0", "."):
            message = conversation().command(f"{command} {tmp_path}/{name}")
            assert message.startswith(f"{command}: "), message


def test_exit_ends_it():
    talk = conversation()
    assert talk.command("/exit ") == "" and talk.has_ended


@pytest.mark.parametrize(
    ("text", "goes_on", "said"),
    [
        ('"""', True, ""),
        ('"""a\nb', True, "a\nb"),
        ('"""a\n"""', False, "a"),
        ('"""\n/help\n"""', False, "/help"),
        ('say """', False, 'say """'),
        ('"""doc"""\ncode', False, '"""doc"""\ncode'),
        ('"""doc"""\ncode = """x"""', False, '"""doc"""\ncode = """x"""'),
        ("plain", False, "plain"),
    ],
)
def test_triple_quotes(text, goes_on, said):
    assert is_open(text) is goes_on
    assert unquote(text) == said


# ---- a full context


def words(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def test_the_oldest_turns_make_room():
    """A turn has 4 words, the system message 2; a context of 20 leaves 5 for the answer."""
    talk = conversation("a", "b", "c", "d", system="Be brief")
    assert words(talk.messages("e")) == 19
    assert talk.num_to_drop("e", words, 1000) == 0
    assert [talk.num_to_drop("e", words, length) for length in (20, 18, 12, 8, 4)] == [
        1,
        2,
        3,
        4,
        4,
    ]
    talk.command("/set max_tokens 1")
    assert talk.num_to_drop("e", words, 20) == 0, "no more room than the answer may take"
    with pytest.raises(
        CapacityError, match="it has 3 tokens, and the context has 3, the answer included"
    ):
        talk.num_to_drop("e", words, 3)
    assert len(talk.turns) == 4, "nothing is forgotten for what does not fit"


class Scripted(FakeLLM):
    """Answers with the question, or as the question says."""

    max_model_len = 40
    sampling_defaults: ClassVar[dict[str, Any]] = {}

    def stream(self, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        question = prompt["prompt"].rpartition(" | ")[2]
        if question == "refuse":
            raise ValueError("this cannot be")
        FakeLLM.calls.append((prompt["prompt"], params))
        return self._answer(question)

    def _answer(self, question: str) -> Iterator[RequestOutput]:
        for index, text in enumerate(("re: ", question)):
            if index and question in ("stop", "fail"):
                if question == "stop":
                    raise KeyboardInterrupt
                text = ""
            reason = ("error" if question == "fail" else "stop") if index else None
            output = CompletionOutput(
                index=0, text=text, token_ids=[index], finish_reason=reason, stop_reason=None
            )
            yield RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=[1],
                outputs=[output],
                finished=bool(index),
            )


class Script:
    """A terminal at which somebody says this."""

    def __init__(self, *texts: str, is_terminal: bool = True) -> None:
        self.is_terminal = is_terminal
        self._texts = list(texts)

    def read(self) -> str | None:
        return self._texts.pop(0) if self._texts else None


@pytest.fixture(autouse=True)
def _forgotten():
    FakeLLM.forget()


def test_a_full_context_drops_turns_with_a_notice(capsys):
    talk = conversation(system="Be brief")
    texts = [f"{index} {'x ' * 5}".strip() for index in range(4)]
    assert converse(Scripted(), talk, Script(*texts, "word " * 50, "end"), say) == 1
    out, err = capsys.readouterr()
    assert err.count("The context of 40 tokens is full: the oldest turn is forgotten") == 3, err
    assert "Not answered: the message is too long: with the system message it has 53 tokens" in err
    assert [prompt.split(" | ")[0] for prompt, _ in FakeLLM.calls] == ["Be brief"] * 5
    assert [turn[0] for turn in talk.turns] == [texts[3], "end"] and "re: end\n" in out


def test_a_failure_is_reported_and_the_conversation_goes_on(capsys):
    talk = conversation()
    assert (
        converse(Scripted(), talk, Script("refuse", "fail", "/halp", "and now?"), lambda text: None)
        == 2
    )
    out, err = capsys.readouterr()
    assert (
        "Not answered: this cannot be" in err
        and "finish reason: error" in err
        and "did you mean /help" in err
    )
    assert out == "re: \nre: and now?\n" and talk.turns[-1] == ("and now?", "re: and now?")


def test_ctrl_c_keeps_what_was_said(capsys):
    talk = conversation()
    assert converse(Scripted(), talk, Script("stop", "go on"), say) == 0
    assert talk.turns == [("stop", "re: "), ("go on", "re: go on")]
    assert FakeLLM.calls[1][0] == "stop | re:  | go on"
    with pytest.raises(KeyboardInterrupt):  # who runs a program over a pipe ends it so
        converse(Scripted(), talk, Script("stop", is_terminal=False), say)


# ---- a pipe


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("jaxpage.llm.LLM", FakeLLM)
    return FakeLLM


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.main(["chat", *words])


def test_a_pipe_is_read_to_its_end(fake, monkeypatch, capsys):
    """An empty line is nothing; only answers go to standard output."""
    text = 'Hi\n\n \nAnd?\n/reset\n"""\ntwo\n\nlines\n"""\n/exti\nlast'
    assert chat(monkeypatch, text, "demo", "--system", "Be brief") == 0
    assert [prompt["prompt"] for prompt, _ in fake.calls] == [
        "Be brief | Hi",
        "Be brief | Hi | Hello wörld | And?",
        "Be brief | two\n\nlines",
        "Be brief | two\n\nlines | Hello wörld | last",
    ]
    out, err = capsys.readouterr()
    assert out == "Hello wörld\n" * 4
    assert "> " not in err and "did you mean /exit?" in err


def test_pictures_of_the_command_line_are_shown_with_the_first_question(fake, monkeypatch, capsys):
    questions = []
    prompt = {"prompt": "Hi", "prompt_token_ids": [1]}
    monkeypatch.setattr(
        FakeLLM, "chat_prompt", lambda _, messages: questions.append(messages) or prompt
    )
    assert chat(monkeypatch, "Hi\n", "demo", "--image", str(YELLOW), "--image", str(YELLOW)) == 0
    picture = {"type": "image", "image": str(YELLOW)}
    content = [picture, picture, {"type": "text", "text": "Hi"}]
    assert questions[-1] == [{"role": "user", "content": content}]
    assert "The first question has 2 pictures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing.png", "is no file"), ("x" * 300, "File name too long"), (".", "is no file")],
)
def test_a_wrong_picture_of_the_command_line_is_reported_before_the_start(
    name, problem, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxpage.cli.chat.engine_for_one", lambda *_, **__: pytest.fail("started"))
    assert chat(monkeypatch, "Hi\n", "demo", "--image", str(tmp_path / name)) == 2
    assert problem in capsys.readouterr().err


def test_exit_ends_a_pipe_too(fake, monkeypatch):
    assert chat(monkeypatch, "/exit\nmore\n") == 0 and not fake.calls


def test_a_question_of_a_pipe_that_is_not_answered_is_status_1(fake, monkeypatch, capsys):
    monkeypatch.setattr(FakeLLM, "max_model_len", 8)
    assert chat(monkeypatch, "one two three four five six seven eight\nshort\n") == 1
    assert capsys.readouterr().out == "Hello wörld\n"


def test_a_pipe_that_cannot_be_read_ends_it(fake, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert cli.main(["chat"]) == 1 and not fake.calls
    sys.stdin.close()
    assert cli.main(["chat"]) == 1


def test_a_text_in_quotes_may_be_cut_off(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""one\n\ntwo'))
    lines = Lines()
    assert (lines.read(), lines.read()) == ('"""one\n\ntwo', None)


# ---- how answers are drawn


@pytest.mark.parametrize(
    ("stated", "words", "expected", "message"),
    [
        (
            {},
            [],
            (0.7, 0.9),
            "Sampling: temperature=0.7 (chat's default), top_p=0.9 (chat's default)",
        ),
        (
            {"temperature": 0.3},
            [],
            (0.3, 0.9),
            "Sampling: temperature=0.3 (generation_config.json), top_p=0.9 (chat's default)",
        ),
        ({"temperature": 1.0, "top_p": 1.0}, [], (1.0, 1.0), "top_p=1.0 (generation_config.json)"),
        (
            {"temperature": 0.0},
            [],
            (0.0, 1.0),
            "Sampling: temperature=0.0 (generation_config.json)\n",
        ),
        ({}, ["--temperature", "1"], (1.0, 0.9), "Sampling: top_p=0.9 (chat's default)"),
        ({}, ["--temperature", "1", "--top-p", "1"], (1.0, 1.0), None),
    ],
)
def test_where_generation_config_is_silent_a_chat_takes_its_own(
    stated, words, expected, message, fake, monkeypatch, capsys
):
    monkeypatch.setattr(FakeLLM, "sampling_defaults", stated)
    assert chat(monkeypatch, "Hi\nAnd?\n", *words) == 0
    assert {(params.temperature, params.top_p) for _, params in fake.calls} == {expected}
    err = capsys.readouterr().err
    assert err.count("Sampling:") == (message is not None), "once"
    assert message is None or message in err


def test_only_a_chat_has_defaults_of_its_own(fake):
    assert cli.main(["generate", "x"]) == 0
    assert (fake.calls[0][1].temperature, fake.calls[0][1].top_p) == (1.0, 1.0)
    assert chat_defaults({}) == {"temperature": 0.7, "top_p": 0.9}


# ---- history


def test_history_is_private_and_never_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    history, path = open_history(), tmp_path / "state" / "jaxpage" / "chat_history"
    history.store_string("two\nlines")
    assert list(open_history().load_history_strings()) == ["two\nlines"]
    assert (
        stat.S_IMODE(path.stat().st_mode) == 0o600
        and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    )
    path.chmod(0o644)
    open_history()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, (
        "one that others could read is closed to them"
    )
    path.unlink()
    path.mkdir()  # what cannot be read or written any more
    history.store_string("lost")
    history.store_string("\udcff")
    assert list(history.load_history_strings()) == []
    assert type(open_history()).__name__ == "InMemoryHistory"
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/x")
    open_history().store_string("kept for now")


# ---- keys

PROGRAM = """
import time
from types import SimpleNamespace
from jaxpage.cli.chat import converse
from jaxpage.cli.conversation import Conversation
from jaxpage.cli.line_editor import LineEditor
from jaxpage.cli.resolving import say
from jaxpage.outputs import CompletionOutput, RequestOutput
from tests.support.fake_llm import FakeLLM

class Echo(FakeLLM):
    def chat_prompt(self, messages):
        return {"prompt_token_ids": [], "prompt": messages[-1]["content"], "num": len(messages)}

    def stream(self, prompt, params):
        number = 0
        while prompt["prompt"] == "slow" or not number:
            text = "tick " if number else f"[{prompt['num']} {prompt['prompt']!r}]"
            output = CompletionOutput(index=0, text=text, token_ids=[0], finish_reason=None)
            yield RequestOutput(request_id="0", prompt=None, prompt_token_ids=[1], outputs=[output], finished=False)
            number += 1
            time.sleep(0.01)

with LineEditor() as editor:
    converse(Echo(), Conversation({}), editor, say)
print("ended")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "chatting.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def screen(program, tmp_path):
    with terminal(
        [sys.executable, program], PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path)
    ) as screen:
        screen.expect(READY)
        yield screen


def test_keys(screen, tmp_path):
    screen.paste("Tell me\n\nls -l\n/exit\n")  # one text, whatever is in it
    screen.press(ENTER)
    screen.expect(r"[1 'Tell me\n\nls -l\n/exit']")
    screen.expect(READY)
    screen.press(f"one{ALT_ENTER}two{ENTER}")
    screen.expect(r"[3 'one\ntwo']")
    screen.expect(READY)
    screen.press(f'"""a{ENTER}{ENTER}b"""{ENTER}')
    screen.expect(r"[5 'a\n\nb']")
    screen.expect(READY)
    screen.press(f"garbage{CTRL_C}")
    screen.expect(READY)
    screen.press(ENTER * 3 + CTRL_C)  # an empty line is nothing, neither is Ctrl-C in it
    screen.expect("Ctrl-D or /exit ends the conversation")
    screen.expect(READY)
    screen.press(f"slow{ENTER}")
    screen.expect("tick tick")
    screen.press(CTRL_C)
    screen.expect(READY)
    screen.press(UP + UP + ENTER)  # the text before the last
    screen.expect(r"[9 'a\n\nb']")
    screen.expect(READY)
    screen.press(f"/hlp{ENTER}")
    screen.expect("did you mean /help?")
    screen.expect(READY)
    screen.press(CTRL_D)
    screen.expect("ended")
    assert screen.end() == 0
    assert "+ls -l" in (tmp_path / "jaxpage" / "chat_history").read_text()


def test_nothing_of_a_paste_reaches_the_shell(program, tmp_path):
    """Without bracketed paste each line is a text of its own, and an empty line ends nothing."""
    marker = tmp_path / "marker"
    environment = {
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(tmp_path),
        "PS1": "shell> ",
        "ENV": "",
    }
    with terminal(["/bin/sh", "-i"], **environment) as screen:
        screen.expect("shell> ")
        # so that no line is wrapped
        screen.press(f"cd {tmp_path}; {sys.executable} {program}{ENTER}")
        screen.expect(READY)
        screen.press(f"first{ENTER}{ENTER}touch marker{ENTER}ls{ENTER}")
        screen.expect("[1 'first']")
        screen.expect("[3 'touch marker']")
        screen.expect("[5 'ls']")
        screen.expect(READY)
        screen.press(f"/exit{ENTER}touch marker{ENTER}")  # what is left at its end
        screen.expect("ended")
        screen.expect("shell> ")
        screen.press(f"echo still $((40 + 2)){ENTER}")
        screen.expect("still 42")
        assert not marker.exists()


@pytest.mark.sweep  # seconds for the start of an engine; keys at a terminal are above
def test_the_demo_model_at_a_terminal(tmp_path):
    """The command runs as it is, in a process of its own."""
    command = [sys.executable, "-m", "jaxpage", "chat", "demo", "--max-tokens", "8", "--seed", "1"]
    with terminal(command, PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path)) as screen:
        start = screen.expect(READY)
        assert "temperature=0.65 (generation_config.json), top_p=0.9 (chat's default)" in start
        assert "KV pool" not in start and "PyTorch" not in start
        screen.paste("Tell me of the fox\n\nls\n")
        screen.press(ENTER)
        screen.expect("8 tokens")
        screen.expect(READY)
        screen.press(f"/set max_tokens 3{ENTER}And then?{ENTER}")
        screen.expect("max_tokens = 3")
        screen.expect("[3 tokens")
        screen.expect(READY)
        screen.press(CTRL_D)
        assert screen.end() == 0
