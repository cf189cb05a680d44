"""Completion by a shell: what it is told of commands, options, recipes and runs."""

import pytest

from windlass.config import shipped


@pytest.fixture
def complete(program, place, monkeypatch, capsys):
    """The words that a shell is offered in place of the last one."""

    def call(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_WINDLASS_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit):
            program(cwd=place)
        out, err = capsys.readouterr()
        assert err == ""
        return out.split()

    return call


def test_commands_and_options_are_completed(complete):
    assert complete("windlass tr") == ["train"]
    assert complete("windlass evaluate tiny train.steps=5 --sp") == ["--split"]
    assert complete("windlass nothing --") == ["--version", "--install-completion"] + [
        "--show-completion",
        "--help",
    ]


@pytest.mark.parametrize("command", ["train", "plan", "data", "launch", "new x.yaml --from"])
@pytest.mark.long
def test_recipes_are_completed_those_that_ship_and_files(complete, command):
    assert complete(f"windlass {command} ") == [*shipped(), "tiny.yaml"]
    assert complete(f"windlass {command} chat-l") == ["chat-lora"]


@pytest.mark.parametrize("command", ["evaluate", "export", "runs", "compare a", "report", "chat"])
def test_runs_are_completed_by_name_and_by_folder(complete, place, command):
    (run,) = (place / "runs").glob("tiny-*")
    assert complete(f"windlass {command} ti") == [run.name]
    assert complete(f"windlass {command} runs/") == [f"runs/{run.name}"]


def test_a_shell_is_given_its_script(program, monkeypatch, capsys):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "zsh")
    with pytest.raises(SystemExit):
        program("--show-completion")
    assert "compdef _windlass_completion windlass" in capsys.readouterr().out
