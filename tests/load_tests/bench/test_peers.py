"""A run over contestants that are real processes, and what its figures say."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from load_tests.bench import peer_setup, peers
from load_tests.bench.contestants import CONTESTANTS, Contestant, OfflineCommand
from load_tests.bench.peer_setup import INSTALLATIONS, PeerFolder, set_up
from load_tests.bench.peers_report import Entry, draw, far_behind, path_costs, print_tables, ratios, standings
from load_tests.servers import ServerCommand
from serve_app.core.autosize import MIN_SLOTS
from serve_app.launch.ports import free_port
from serve_app.settings import Settings
from serve_app.workloads.mixes import SAMPLED, WorkItem

CONFIG = Path(__file__).parents[3] / "deploy" / "config.yaml"
WORD_SERVER = Path(__file__).with_name("word_server.py")


def word_server(*options: str, **kind: Any) -> Contestant:
    def make(_folder: PeerFolder, _config: Path) -> ServerCommand:
        port = free_port()
        return ServerCommand(
            "words", (sys.executable, str(WORD_SERVER), str(port), *options), f"http://127.0.0.1:{port}", "/health"
        )

    return Contestant("words", make, **kind)


def ends_early(_folder: PeerFolder, _config: Path) -> ServerCommand:
    return ServerCommand("broken", (sys.executable, "-c", "exit(3)"), f"http://127.0.0.1:{free_port()}", "/")


def does_not_install(_folder: PeerFolder, _shell: Any) -> None:
    raise RuntimeError("no such package")


def run(names: str, *options: str) -> Any:
    app = typer.Typer()
    app.command()(peers.main)
    return CliRunner(env={"COLUMNS": "240"}).invoke(app, ["--contestants", names, "--wait-quiet", "0", *options])


def test_everybody_is_measured_and_who_is_not_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, contestant in {
        "us": word_server(ours=True),
        "peer": word_server(),
        "liar": word_server("too_short"),
        "slow": word_server(),
        "broken": Contestant("broken", ends_early),
        "absent": Contestant("absent", ends_early, ("nowhere",)),
    }.items():
        monkeypatch.setitem(CONTESTANTS, name, contestant)
    monkeypatch.setitem(INSTALLATIONS, "nowhere", ("1", does_not_install))
    # Who that would be is a matter of chance among servers that answer at once.
    monkeypatch.setattr(peers, "far_behind", lambda _entries, _workloads: {"slow"})
    files = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png"), "--peers", str(tmp_path / "peers")]
    options = ["--workloads", "decode:3,single:1", "--repeats", "2", *files]
    result = run("us,peer,liar,slow,broken,absent", *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "a.json").read_text())
    who = report["contestants"]
    assert "no such package" in who["absent"]["reason"]
    assert "ended with status 3" in who["broken"]["reason"]
    assert [who[name]["reason"] for name in ("us", "peer", "liar", "slow")] == [None] * 4
    assert [len(who[name]["ready_s"]) for name in who] == [2, 2, 2, 1, 0, 0]
    assert {name: list(done) for name, done in report["results"].items()} == {
        **dict.fromkeys(("us", "peer", "liar", "slow"), ["decode", "single"]),
        **dict.fromkeys(("broken", "absent"), []),
    }
    runs = report["results"]["us"]["decode"]["runs"]
    assert [(one["requests"], one["failures"], one["wrong_length"]) for one in runs] == [(3, 0, 0)] * 2
    assert all(one["server_pss_mib"] > 1 for one in runs)
    assert report["results"]["liar"]["decode"]["median"]["wrong_length"] == 3
    assert {standing["peer"] for standing in report["against_best_peer"]} <= {"peer", "slow"}
    for text in ("no such package", "ended with status 3", "not measured again: slow"):
        assert text in result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_answers_of_ours_fail_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTESTANTS, "us", word_server("too_short", ours=True))
    result = run("us", "--workloads", "single:1", "--repeats", "1", "--peers", str(tmp_path / "new"))
    assert result.exit_code == 1


@pytest.mark.parametrize("option", ["--workloads=decod", "--workloads=decode:0", "--contestants=somebody"])
def test_unknown_names_are_refused_before_anything_runs(option: str) -> None:
    result = run("serve_app", option)
    assert result.exit_code == 2


def entry(rate: float, ttft: float = 50.0, itl: float | None = 10.0, wrong: int = 0, **kind: Any) -> Entry:
    figures = {
        "output_tok_s": rate,
        "prompt_tok_s": 10 * rate,
        "ttft_ms": {"p50": ttft},
        "itl_ms": {"p50": itl, "p99": itl},
        "failures": 0,
        "wrong_length": wrong,
        "prompt_mismatch": 0,
        "foreign_cores": 0.0,
        "server_pss_mib": 1.0,
    }
    done = Entry(Contestant("", ends_early, **kind))
    for workload in ("decode", "prefill", "first_token"):
        done.add(workload, figures)
    return done


ENTRIES = {
    "serve_app": entry(200.0, 40.0, 5.0, ours=True),
    "serve_app_exact": entry(120.0, 60.0, None, ours=True, exact=True),
    "engine": entry(250.0, 35.0, 4.0, ours=True, engine=True),
    "other_engine": entry(100.0, 35.0, 4.0, engine=True),
    "small": entry(100.0, 80.0, 20.0),
    "exact": entry(60.0, 50.0, 40.0, exact=True),
    "wrong": entry(1000.0, 1.0, 1.0, wrong=1),
}


def test_ours_are_held_against_the_best_peer_of_their_kind() -> None:
    found = {(s.workload, s.contestant, s.figure): (s.peer, s.ratio) for s in standings(ENTRIES, ["decode", "prefill"])}
    assert found["decode", "serve_app", "tok/s"] == ("small", 2.0)
    assert found["decode", "serve_app", "TTFT p50 ms"] == ("exact", 0.8)
    assert found["decode", "serve_app", "ITL p99 ms"] == ("small", 0.25)
    assert found["prefill", "serve_app", "tok/s"] == ("small", 2.0)
    assert found["decode", "serve_app_exact", "tok/s"] == ("exact", 2.0)
    assert ("decode", "serve_app_exact", "ITL p99 ms") not in found
    assert found["decode", "engine", "tok/s"] == ("other_engine", 2.5)


def test_every_peer_has_its_ratio() -> None:
    assert ratios(ENTRIES, "decode") == {
        "serve_app": {"small": 2.0, "exact": 3.333},
        "serve_app_exact": {"exact": 2.0},
        "engine": {"other_engine": 2.5},
    }


def test_table_and_picture_name_the_opponent_of_each_ratio(tmp_path: Path) -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    print_tables(console, ENTRIES, ["decode"])
    text = console.export_text()
    assert "2.00x small (200 / 100)" in text
    assert "2.50x other_engine (250 / 100)" in text
    draw(tmp_path / "a.svg", ENTRIES, ["decode", "first_token"])
    picture = (tmp_path / "a.svg").read_text()
    assert "serve_app: 2.00x small" in picture
    assert "serve_app: 0.80x exact" in picture
    assert all(f"<!-- {label} -->" in picture for label in ("200", "50.0"))


def test_only_peers_that_decide_nothing_are_not_asked_again() -> None:
    entries = {
        "ours": entry(10.0, ours=True),
        "best": entry(100.0, 80.0, 20.0),
        "close": entry(80.0, 90.0, 45.0),
        "behind": entry(79.0, 90.0, 45.0),
        "behind_but_first_token": entry(10.0, 1.0, 45.0),
        "best_exact": entry(60.0, 50.0, 40.0, exact=True),
        "behind_exact": entry(47.0, 90.0, 45.0, exact=True),
        "lone_engine": entry(1.0, engine=True),
        "best_and_wrong": entry(1000.0, 1.0, 1.0, wrong=1),
        "not_started": Entry(Contestant("", ends_early)),
    }
    behind = {"behind", "behind_exact", "best_and_wrong"}
    assert far_behind(entries, ["decode", "prefill", "first_token"]) == behind


def test_the_path_costs_what_the_engine_alone_does_not_need() -> None:
    assert path_costs(ENTRIES) == {"serve_app": {"decode_share": 0.2, "first_token_ms": 5.0}}


def test_what_is_installed_is_left_alone_and_another_version_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for version in ("1", "1", "2"):
        monkeypatch.setitem(INSTALLATIONS, "thing", (version, lambda _folder, shell: calls.append(shell.run("true"))))
        assert set_up(PeerFolder(tmp_path), ["thing"]) == {}
    assert len(calls) == 2


def test_an_installation_that_fails_says_why_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(_folder: PeerFolder, shell: Any) -> None:
        shell.run("sh", "-c", "echo it is too big; echo; exit 4")

    monkeypatch.setitem(INSTALLATIONS, "thing", ("1", install))
    for _ in range(2):
        reason = set_up(PeerFolder(tmp_path), ["thing"])["thing"]
        assert "sh ended with status 4: it is too big" in reason
    assert set(peer_setup.INSTALLATIONS) >= {need for one in CONTESTANTS.values() for need in one.needs}


def test_ours_start_with_configs_that_the_server_takes(tmp_path: Path) -> None:
    modes = {}
    for name in ("serve_app", "serve_app_exact", "serve_run"):
        command = CONTESTANTS[name].make(PeerFolder(tmp_path), CONFIG)
        assert isinstance(command, ServerCommand)
        document = yaml.safe_load(Path(command.command[-1]).read_text())
        assert command.base_url.endswith(f":{document['http_options']['port']}")
        modes[name] = Settings.model_validate(document["applications"][0]["args"]).quantization
    assert modes == {"serve_app": Settings().quantization, "serve_app_exact": "none", "serve_run": modes["serve_app"]}
    assert isinstance(CONTESTANTS["engine"].make(PeerFolder(tmp_path), CONFIG), OfflineCommand)


def test_peers_run_as_many_sequences_as_ours_at_least_and_beside_that_their_default(tmp_path: Path) -> None:
    told = {}
    for name in ("llama_q4_0", "vllm_bfloat16", "openvino_q4_0", "ray_serve_llm"):
        for suffix in ("", "_defaults"):
            text = " ".join(CONTESTANTS[name + suffix].make(PeerFolder(tmp_path), CONFIG).command)
            told[name + suffix] = re.search(r"(?:--parallel|--max-num-seqs|\"max_num_seqs\":) (\d+)", text)
    assert all((match is None) == name.endswith("_defaults") for name, match in told.items())
    assert {match[1] for match in told.values() if match} == {str(MIN_SLOTS)}


def test_transformers_serve_gets_the_number_of_tokens_in_its_own_way(tmp_path: Path) -> None:
    command = CONTESTANTS["transformers_serve"].make(PeerFolder(tmp_path), CONFIG)
    assert isinstance(command, ServerCommand)
    body = command.client().body(WorkItem("a b", 2, 77))
    assert body["generation_config"] == '{"max_new_tokens": 77, "do_sample": false}'
    assert "ignore_eos" not in body
    sampled = command.client().body(WorkItem("a b", 2, 77, sampling=SAMPLED))
    assert json.loads(sampled["generation_config"]) == {
        "max_new_tokens": 77,
        "do_sample": True,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 0,
    }


@pytest.mark.parametrize("name", [name for name in CONTESTANTS if name != "transformers_serve"])
def test_every_server_is_told_how_to_sample_and_not_to_truncate_by_defaults_of_its_own(
    name: str, tmp_path: Path
) -> None:
    command = CONTESTANTS[name].make(PeerFolder(tmp_path), CONFIG)
    if isinstance(command, ServerCommand):
        body = command.client().body(WorkItem("a b", 2, 77, sampling=SAMPLED))
        wanted = {"temperature": 0.9, "top_p": 0.95, "top_k": 0, "min_p": 0, "max_tokens": 77}
        assert {key: body[key] for key in wanted} == wanted
