from __future__ import annotations

import pytest
from pydantic_settings import CliApp

from outrider_operator.command import run
from outrider_operator.settings import Settings


def test_every_setting_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_RUNTIME_IMAGE", "registry/runtime:1")
    monkeypatch.setenv("OUTRIDER_NAMESPACES", "a, b,")
    monkeypatch.setenv("OUTRIDER_LEADER_ELECT", "false")
    settings = Settings()
    assert settings.runtime_image == "registry/runtime:1"
    assert settings.namespaces == ("a", "b")
    assert settings.leader_elect is False


def test_every_setting_is_a_flag_and_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_RUNTIME_IMAGE", "from-environment")
    arguments = ["--leader-elect=false", "--namespaces", "x,y", "--runtime-image", "from-flag"]
    settings = CliApp.run(Settings, cli_args=arguments)
    assert (settings.leader_elect, settings.namespaces, settings.runtime_image) == (False, ("x", "y"), "from-flag")


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--concurrency", "0"], "concurrency"),
        (["--log-format", "xml"], "log_format"),
        (["--measure-seconds", "30"], "measure_seconds"),
    ],
)
def test_a_wrong_setting_ends_the_program_with_its_name(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert word in capsys.readouterr().err.replace("-", "_")


def test_no_way_to_log_in_is_said_in_words(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run(["--kubeconfig", f"{tmp_path}/missing", "--log-format", "console"]) == 1
    assert "give --kubeconfig" in capsys.readouterr().err
