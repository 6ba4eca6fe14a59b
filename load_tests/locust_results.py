"""The results of a locust run: our figures in locust's statistics, one report, and the exit status.

Decides what is counted and when a run has failed; `locustfile` decides how users behave. With
several processes, each worker sends its results to the master, which alone writes the report.

Beside its own rows, locust's statistics and page get: `TTFT` and `ITL` (mean gap of one answer) in
milliseconds, `output tok/s` (of one answer; in that row the column's "ms" are tokens per second),
and `met` or `missed` for each answer, so that the requests per second of `met` are the goodput.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from locust.runners import WorkerRunner

from load_tests.bench.run_report import run_page
from load_tests.bench.server_view import ServerView, compare_views
from serve_app.workloads.client import RequestResult, Run
from serve_app.workloads.figures import Objective, summarize
from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.report import circumstances

_MESSAGE_KEY = "serve_app_results"
logger = logging.getLogger(__name__)


class Collector:
    """The results of all users of a run, with absolute times until the report is made."""

    def __init__(self) -> None:
        self.results: list[RequestResult] = []
        self._before: ServerView | None = None
        self._after: ServerView | None = None
        self._started = time.time()
        self._ended: float | None = None

    def listen(self, events: Any) -> None:
        """Hook into locust."""
        events.init_command_line_parser.add_listener(_add_options)
        events.init.add_listener(self._on_init)
        events.test_start.add_listener(self._on_start)
        events.test_stop.add_listener(self._on_stop)
        events.report_to_master.add_listener(self._send)
        events.worker_report.add_listener(self._receive)
        events.quitting.add_listener(self._on_quitting)

    def report(self, environment: Any) -> tuple[dict[str, Any], str]:
        """The report so far, as plain data and as a page."""
        objective = objective_of(environment.parsed_options)
        results = tuple(replace(result, due_s=result.due_s - self._started) for result in self.results)
        seconds = max(1e-3, (self._ended or time.time()) - self._started)
        run = Run(
            Workload("locust", tuple(result.item for result in results), None), results, seconds, time.process_time()
        )
        views = compare_views(self._before, self._after, results)
        summary = summarize(run, objective=objective)
        options = environment.parsed_options
        facts = circumstances(
            server=environment.host, users=options.num_users, shape=options.shape, pace_s=options.pace
        )
        data = {
            "circumstances": facts,
            "results": {"locust": {"median": summary, "runs": [summary]}},
            "server_view": [view.as_dict() for view in views],
        }
        return data, run_page("Users who chat", facts, run, summary, objective, views)

    def _on_init(self, environment: Any, **_: Any) -> None:
        # Answers in progress at the end of the run are read to their end: cutting them off would
        # lose the slow ones.
        environment.stop_timeout = environment.stop_timeout or 60.0
        if environment.web_ui is not None:
            environment.web_ui.app.add_url_rule("/report", "serve_app_report", lambda: self.report(environment)[1])

    def _on_start(self, environment: Any, **_: Any) -> None:
        self.results.clear()
        self._started, self._ended, self._after = time.time(), None, None
        if not isinstance(environment.runner, WorkerRunner):
            self._before = ServerView.read(_host(environment))

    def _on_stop(self, environment: Any, **_: Any) -> None:
        self._ended = time.time()
        if isinstance(environment.runner, WorkerRunner):
            # The next report would be due seconds from now, when the master may have ended; and
            # until then a worker
            # would sit out its stop timeout although all users have stopped.
            environment.runner._send_stats()
            environment.stop_timeout = 0.0
        else:
            self._after = ServerView.read(_host(environment))

    def _send(self, data: dict[str, Any], **_: Any) -> None:
        data[_MESSAGE_KEY] = [asdict(result) for result in self.results]
        self.results.clear()

    def _receive(self, data: Mapping[str, Any], **_: Any) -> None:
        for fields in data.get(_MESSAGE_KEY, ()):
            self.results.append(RequestResult(**{**fields, "item": WorkItem(**fields["item"])}))

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        """Write the report, log the verdict, and fail when the objective was missed."""
        if isinstance(environment.runner, WorkerRunner):
            return
        options = environment.parsed_options
        data, html = self.report(environment)
        if options.report:
            Path(options.report).write_text(html, encoding="utf-8")
        if options.report_json:
            Path(options.report_json).write_text(json.dumps(data, indent=1) + "\n")
        summary = data["results"]["locust"]["median"]
        wanted = objective_of(options).goodput
        logger.info(
            "goodput %.1f%% of %d requests (wanted %.0f%%), %s output tokens/s, TTFT %s ms, ITL %s ms",
            100 * summary["goodput"],
            summary["requests"],
            100 * wanted,
            summary["output_tok_s"],
            summary["ttft_ms"],
            summary["itl_ms"],
        )
        if summary["goodput"] < wanted:
            logger.error("objective missed")
            environment.process_exit_code = 1


def objective_of(options: Any) -> Objective:
    """From the command line."""
    return Objective(options.slo_ttft, options.slo_tpot, options.goodput)


def report_turn(environment: Any, collector: Collector, answer: RequestResult) -> None:
    """Count one answer: for the report, and in locust's statistics (milliseconds)."""
    # Prompt and output lengths are what the server counted, so no length is wrong.
    answer.item = WorkItem("", answer.prompt_tokens or 0, answer.output_tokens)
    collector.results.append(answer)
    if answer.error is not None:
        return
    figures = {}
    if answer.ttft_s is not None:
        figures["TTFT"] = 1000 * answer.ttft_s
        figures["met" if objective_of(environment.parsed_options).met_by(answer) else "missed"] = 1000 * answer.e2e_s
    if answer.gaps_s:
        figures["ITL"] = 1000 * sum(answer.gaps_s) / len(answer.gaps_s)
        figures["output tok/s"] = answer.output_tokens / answer.e2e_s
    for name, value in figures.items():
        environment.events.request.fire(
            request_type="stream", name=name, response_time=value, response_length=0, exception=None, context={}
        )


def _add_options(parser: Any) -> None:
    objective = Objective()
    parser.add_argument("--slo-ttft", type=float, default=objective.ttft_s, help="Objective: seconds to first token")
    parser.add_argument("--slo-tpot", type=float, default=objective.tpot_s, help="Objective: mean seconds per token")
    parser.add_argument("--goodput", type=float, default=objective.goodput, help="Objective: share of requests in both")
    parser.add_argument("--report", default="", include_in_web_ui=False, help="Write our HTML report here")
    parser.add_argument("--report-json", default="", include_in_web_ui=False, help="Write our figures here")


def _host(environment: Any) -> str:
    return str(environment.host or environment.user_classes[0].host)
