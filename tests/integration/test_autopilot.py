"""The autopilot on a real Triton, with a real entry and a real Prometheus: what it sees, what it changes, and what it lets be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeModel
from programs import program

from perf.open_loop import Request, Sender
from perf.prometheus import scraping
from perf.relay import Relay, relayed
from perf.subjects import Served, entered
from tritonpilot import metrics
from tritonpilot.autopilot import observe
from tritonpilot.autopilot.act import Actor
from tritonpilot.autopilot.loop import Autopilot, Settings
from tritonpilot.autopilot.observe import Pages, Prometheus, Reading
from tritonpilot.autopilot.record import Entry, Folder
from tritonpilot.autopilot.run import once
from tritonpilot.autopilot.terms import Knobs
from tritonpilot.client import Client
from tritonpilot.costs import Costs
from tritonpilot.errors import HostError, SpecError
from tritonpilot.server import EmbeddedServer
from tritonpilot.top import Endpoints

pytestmark = pytest.mark.server

COMMAND = str(Path(sys.executable).with_name("tritonpilot"))
PATIENCE_S = 60.0
CONFIG = """
backend: "python"
max_batch_size: 1
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU count: 1}]
dynamic_batching { }
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
parameters { key: "pilot_slos_ms" value { string_value: "realtime:2000" } }
"""
POLICY = """\
interval_s: 0.5
models:
  - model: slow
    policy: queue_depth
    instances: {min: 1, max: 3}
    queue_depth: {grow_above: 5, shrink_below: 0}
    cooldown_s: 1
"""


@pytest.fixture(scope="module")
def model_repository(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    root = tmp_path_factory.mktemp("autopilot") / "model_repository"
    make_model(root, "slow", config=CONFIG)
    return root


@pytest.fixture
def server(model_repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(
        model_repository, extra_args=["--metrics-config=summary_latencies=true"], exit_timeout_s=1
    ) as running:
        yield running


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "autopilot.yaml"
    path.write_text(POLICY)
    return path


class Piloted:
    """An autopilot whose intervals the test ends, and what it told."""

    def __init__(self, pilot: Autopilot, told: list[Entry]) -> None:
        self.pilot, self.told = pilot, told

    def step(self) -> Entry:
        """The one decision of an interval."""
        (entry,) = self.pilot.step()
        return entry

    def until(self, is_so: Callable[[Entry], bool]) -> Entry:
        """The first decision that is so."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(0.3)
            for entry in self.pilot.step():
                if is_so(entry):
                    return entry
        raise AssertionError(f"none was so: {[entry.line() for entry in self.told]}")

    def events(self) -> list[str]:
        return [entry.event for entry in self.told]


@contextmanager
def piloting(server: EmbeddedServer, policy: Path, **options: object) -> Iterator[Piloted]:
    settings = replace(settings_of(server, policy), **options)  # type: ignore[arg-type]
    told: list[Entry] = []
    with (
        Folder(settings.state) as folder,
        Actor(settings.triton_grpc, server.control_key, metrics=settings.metrics) as actor,
    ):
        pilot = Autopilot(settings, folder, actor, tell=told.append)
        pilot.look()
        yield Piloted(pilot, told)


def settings_of(server: EmbeddedServer, policy: Path) -> Settings:
    return Settings(
        policy,
        policy.parent / "state",
        server.endpoints.grpc,
        metrics=server.endpoints.metrics,
        key=server.control_key,
        port=0,
    )


@contextmanager
def flooded(server: EmbeddedServer, requests: int = 40, seconds: float = 0.1) -> Iterator[None]:
    """So many requests, of which each takes so long, at once; the block ends when they are answered."""
    request = Request("slow", {"INPUT": np.full((1, 1), seconds, np.float32)})
    with Sender(server.endpoints.grpc) as sender:
        failed: list[str] = []
        thread = threading.Thread(
            target=lambda: failed.extend(each.error for each in sender.send([request] * requests) if each.error)
        )
        thread.start()
        waits(lambda: metrics.pending(metrics.scrape(server.endpoints.metrics), "slow") > 5)
        yield
        thread.join()
    assert not failed, "a change may lose nothing"


def waits(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def instances(server: EmbeddedServer) -> int:
    with server.control() as control:
        return sum(group.count for group in control.config("slow").instance_group)


def set_by_hand(server: EmbeddedServer, knobs: Knobs) -> None:
    with Actor(server.endpoints.grpc, server.control_key) as somebody:
        somebody.apply("slow", knobs)


def test_it_grows_under_load_remembers_it_and_says_why(server: EmbeddedServer, policy: Path) -> None:
    with flooded(server), piloting(server, policy) as piloted:
        entry = piloted.step()

    assert (entry.event, entry.way) == ("change", "instances")
    assert entry.now is not None
    assert entry.now.instances == instances(server) == 2
    logged = [json.loads(line) for line in (policy.parent / "state/decisions.jsonl").read_text().splitlines()]
    assert [each["event"] for each in logged] == ["change"]
    assert "requests wait, more than 5: instances 1 -> 2" in logged[0]["said"]
    assert logged[0]["seen"]["waiting"] > 5
    assert logged[0]["now"]["instances"] == 2
    state = json.loads((policy.parent / "state/state.json").read_text())
    assert state["models"]["slow"]["state"]["wanted"]["instances"] == 2


def test_a_dry_run_tells_once_what_it_would_do_and_changes_nothing(server: EmbeddedServer, policy: Path) -> None:
    with flooded(server, 60), piloting(server, policy, is_dry_run=True) as piloted:
        first = piloted.step()
        time.sleep(0.3)
        second = piloted.step()

    assert (first.event, first.is_dry_run, second.event, second.target) == ("change", True, "change", first.target)
    assert piloted.events() == ["change"]
    assert instances(server) == 1


def test_after_a_restart_of_triton_its_settings_are_set_again(server: EmbeddedServer, policy: Path) -> None:
    with flooded(server), piloting(server, policy) as piloted:
        assert piloted.step().event == "change"
    ports = {f"{name}_port": int(where.rpartition(":")[2]) for name, where in server.endpoints.as_dict().items()}
    with ExitStack() as stack:
        piloted = stack.enter_context(piloting(server, policy))
        os.kill(server.pid, signal.SIGKILL)
        server.wait(10)
        time.sleep(0.1)
        assert piloted.step().seen.problem  # type: ignore[union-attr]
        again = stack.enter_context(EmbeddedServer(server.repository, exit_timeout_s=1, **ports))  # type: ignore[arg-type]
        assert instances(again) == 1, "as its file says"

        entry = piloted.until(lambda each: each.event == "change")

        assert "Triton came back with 1 instance" in entry.said
        assert instances(again) == 2
        assert piloted.events() == ["problem", "recovered", "change"]


def test_what_someone_sets_is_respected(server: EmbeddedServer, policy: Path) -> None:
    with piloting(server, policy) as piloted:
        piloted.step()
        set_by_hand(server, Knobs(0, 3))
        entry = piloted.until(lambda each: each.event != "keep")

    assert (entry.event, instances(server)) == ("adopt", 3)
    assert "someone set 3 instances" in entry.said


def test_what_someone_sets_is_reclaimed_where_the_policy_says_so(server: EmbeddedServer, policy: Path) -> None:
    policy.write_text(POLICY + "    on_foreign_change: reclaim\n")
    with piloting(server, policy) as piloted:
        piloted.step()
        set_by_hand(server, Knobs(0, 3))
        entry = piloted.until(lambda each: each.event != "keep")

    assert (entry.event, instances(server)) == ("change", 1)


def test_what_someone_set_while_no_autopilot_ran_is_respected_too(server: EmbeddedServer, policy: Path) -> None:
    with flooded(server), piloting(server, policy) as piloted:
        assert piloted.step().event == "change"
    set_by_hand(server, Knobs(0, 3))

    with piloting(server, policy) as piloted:
        entry = piloted.until(lambda each: each.event != "keep")

    assert (entry.event, instances(server)) == ("adopt", 3)


def test_a_model_that_is_unloaded_is_left_alone_and_gets_its_settings_back(
    server: EmbeddedServer, policy: Path
) -> None:
    with flooded(server), piloting(server, policy) as piloted:
        assert piloted.step().event == "change"
        server.unload("slow")
        entry = piloted.step()
        assert entry.event == "keep"
        assert "Triton does not serve the model slow" in entry.said
        server.load("slow")
        assert piloted.until(lambda each: each.event == "change").target == entry.seen.knobs  # type: ignore[union-attr]
        assert instances(server) == 2


def test_a_policy_that_becomes_wrong_stays_as_it_was_and_is_said_once(server: EmbeddedServer, policy: Path) -> None:
    with piloting(server, policy) as piloted:
        policy.write_text(POLICY.replace("queue_depth", "quue_depth", 1))
        piloted.step()
        piloted.step()
        assert piloted.events() == ["policy"]
        assert "What was read before stays in force" in piloted.told[0].said
        assert piloted.pilot.metrics.policy_trouble

        policy.write_text(POLICY.replace("max: 3", "max: 2"))
        piloted.step()
        assert piloted.pilot.policy.models[0].instances.max == 2
        policy.unlink()
        piloted.step()
        assert piloted.pilot.policy.models[0].instances.max == 2
    assert piloted.events() == ["policy", "policy", "policy"]


def test_a_class_that_the_model_does_not_have_is_named(server: EmbeddedServer, policy: Path) -> None:
    policy.write_text(POLICY + "    max_queue_sizes: {bach: {min: 1, max: 10}}\n")
    with piloting(server, policy) as piloted:
        piloted.pilot.step()

    assert piloted.events() == ["problem"]
    assert "the class bach of slow; did you mean batch?" in piloted.told[0].said


def test_a_wrong_policy_file_is_refused_at_the_start(server: EmbeddedServer, policy: Path) -> None:
    policy.write_text(POLICY.replace("min: 1, max: 3", "min: 3, max: 1"))

    with pytest.raises(SpecError, match="min 3 is above max 1"):
        once(settings_of(server, policy), None)  # type: ignore[arg-type]


def test_where_it_waits_for_a_policy_models_follow_when_the_file_is_right(server: EmbeddedServer, policy: Path) -> None:
    """In a pod its end would take a Triton out of service that is well."""
    policy.write_text(POLICY.replace("min: 1, max: 3", "min: 3, max: 1"))
    with piloting(server, policy, waits_for_policy=True) as piloted:
        assert piloted.pilot.step() == []
        assert piloted.pilot.step() == []
        assert piloted.events() == ["policy"]
        assert "min 3 is above max 1" in piloted.told[0].said
        assert "No model is looked after until the file is right" in piloted.told[0].said
        assert piloted.pilot.metrics.policy_trouble

        policy.write_text(POLICY)
        assert piloted.until(lambda _: True).model == "slow"
        assert not piloted.pilot.metrics.policy_trouble


def test_costs_are_read_again_when_they_change(server: EmbeddedServer, policy: Path) -> None:
    costs = policy.with_name("costs.json")
    Costs(rows=(1,), execution_us=(100_000.0,), request_us=5.0).write(costs)
    policy.write_text(POLICY.replace("queue_depth\n", "model\n", 1) + "    costs: costs.json\n    slo_ms: 2000\n")
    with piloting(server, policy) as piloted:
        piloted.pilot.step()
        Costs(rows=(1,), execution_us=(200_000.0,), request_us=5.0).write(costs)
        piloted.pilot.step()
        assert piloted.events() == ["policy"]
        assert "read again" in piloted.told[0].said
        costs.write_text("{")
        piloted.pilot.step()
        assert "What was read before stays in force" in piloted.told[1].said


@pytest.fixture
def relay(server: EmbeddedServer) -> Iterator[Relay]:
    with relayed(server.endpoints.metrics) as found:
        yield found


def test_frozen_metrics_change_nothing_and_are_told(server: EmbeddedServer, policy: Path, relay: Relay) -> None:
    with flooded(server, 60), piloting(server, policy, metrics=relay.address) as piloted:
        relay.freeze("/metrics")  # a long queue, for ever
        piloted.pilot.look()
        answered = metrics.statistics(server.endpoints.grpc, "slow").success
        waits(lambda: metrics.statistics(server.endpoints.grpc, "slow").success > answered + 15)
        entry = piloted.step()
        assert entry.event == "keep", entry
        assert "stand still, but gRPC counted" in entry.said
        relay.thaw()
        piloted.until(lambda each: each.seen is not None and not each.seen.problem)
    assert piloted.events()[:2] == ["problem", "recovered"]


def test_a_page_that_is_cut_off_changes_nothing_and_is_told(server: EmbeddedServer, policy: Path, relay: Relay) -> None:
    with flooded(server), piloting(server, policy, metrics=relay.address) as piloted:
        relay.is_cut = True
        assert piloted.pilot.step() == [], "not even the settings are known, for a live delay stands on that page"
        relay.is_cut = False
        piloted.until(lambda each: each.event == "change")
    assert piloted.events() == ["problem", "recovered", "change"]


def call(entry_http: str, times: int) -> None:
    with Client(entry_http) as client:
        for _ in range(times):
            client.predict("slow", {"INPUT": np.full((1, 1), 0.01, np.float32)}, caller_class="realtime")


def test_what_is_seen_is_what_was_sent_from_the_pages_and_from_a_prometheus(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    program("prometheus")
    with Sender(server.endpoints.grpc) as sender, entered(Served(server, sender)) as entry:
        jobs = {"triton": server.endpoints.metrics, "entry": entry.metrics}
        with scraping(tmp_path, jobs, every_s=1) as running:
            call(entry.http, 1)
            running.wait_for('processed_requests_total{status="ok"} >= 1', PATIENCE_S)
            running.wait_for("nv_inference_request_success >= 1", PATIENCE_S)
            source = Prometheus(running.url, patience_s=5)
            before = [observe.read(each, server.endpoints.grpc) for each in (pages(server, entry.metrics), source)]
            call(entry.http, 50)
            running.wait_for('processed_requests_total{status="ok"} >= 51', PATIENCE_S)
            running.wait_for("nv_inference_request_success >= 51", PATIENCE_S)
            now = [observe.read(each, server.endpoints.grpc) for each in (pages(server, entry.metrics), source)]

        for earlier, later in zip(before, now, strict=True):
            seen = observe.observe(earlier, later, "slow", Knobs(0, 1), at_s=1)
            assert seen.problem == ""
            assert round(seen.arrivals_per_s * seen.seconds) in (50, 51)
            assert seen.arrivals_by_class["realtime"] > 0
            assert seen.p99_ms is not None
            assert 10 <= seen.p99_ms < 2000
            assert (seen.rows_per_request, seen.mean_batch) == (1, 1)
            assert 0.01 < (seen.utilisation or 0) < 1
            assert list(seen.batch_sizes) == [1]
        assert observe.read(source, server.endpoints.grpc).problem.startswith("Prometheus at"), "it has ended"


def pages(server: EmbeddedServer, entry: str = "") -> Pages:
    return Pages(Endpoints(server.endpoints.metrics, http="", entry=entry))


def test_a_prometheus_whose_triton_is_gone_has_old_figures_soon(server: EmbeddedServer, tmp_path: Path) -> None:
    program("prometheus")
    with scraping(tmp_path, {"triton": server.endpoints.metrics}, every_s=1) as running:
        running.wait_for('nv_inference_request_success{model="slow"}', PATIENCE_S)
        source = Prometheus(running.url, patience_s=2)
        assert not observe.read(source, server.endpoints.grpc).problem
        server.stop()
        reading: list[Reading] = []
        waits(lambda: reading.append(observe.read(source, server.endpoints.grpc)) or reading[-1].problem)
    assert "s old" in reading[-1].problem
    assert "did not give statistics" in reading[-1].said


@contextmanager
def commanded(
    server: EmbeddedServer, policy: Path, *options: str
) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """A running `tritonpilot autopilot`: its endpoints, and its process."""
    at = server.endpoints
    argv = [
        COMMAND,
        "autopilot",
        str(policy),
        "--json",
        "--port",
        "0",
        "--triton-grpc",
        at.grpc,
        "--metrics",
        at.metrics,
    ]
    argv += ["--state", str(policy.parent / "state"), *options]
    environment = {**os.environ, "TRITONPILOT_CONTROL_KEY": server.control_key}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["endpoints"], process
        finally:
            process.kill()


def test_the_command_serves_metrics_is_alone_survives_a_kill_and_ends_on_a_signal(
    server: EmbeddedServer, policy: Path
) -> None:
    with commanded(server, policy) as (endpoints, process):
        with flooded(server, 60):
            waits(lambda: told(endpoints, "decisions_total", event="change") >= 1)
        assert told(endpoints, "instances", model="slow") >= 2
        with pytest.raises(HostError, match=f"process {process.pid}"), Folder(policy.parent / "state"):
            pass
        process.kill()
        process.wait()
    kept = instances(server)
    with commanded(server, policy) as (endpoints, process):
        waits(lambda: told(endpoints, "instances", model="slow") == kept)
        assert told(endpoints, "decisions_total", event="adopt") == 0, "what it set before its death is its own"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=15)
        assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["event"] == "stopped"
    assert "stopped: The autopilot was stopped" in err
    assert server.control_key not in err


def told(endpoints: dict[str, str], name: str, **labels: str) -> float:
    return metrics.value(metrics.scrape(endpoints["metrics"]), f"autopilot_{name}", **labels)


def test_once_prints_a_decision_a_model(server: EmbeddedServer, policy: Path) -> None:
    at = server.endpoints
    argv = [COMMAND, "autopilot", str(policy), "--once", "--json", "--triton-grpc", at.grpc, "--metrics", at.metrics]
    environment = {**os.environ, "TRITONPILOT_CONTROL_KEY": server.control_key}
    done = subprocess.run(
        [*argv, "--state", str(policy.parent / "state")], capture_output=True, text=True, env=environment, check=True
    )

    decided = json.loads(done.stdout)

    assert (decided["model"], decided["event"]) == ("slow", "keep")
    assert decided["seen"]["knobs"]["instances"] == 1
    assert "key was missing or wrong" not in done.stderr

    environment["TRITONPILOT_CONTROL_KEY"] = "another-key-0123456789"
    done = subprocess.run(
        [*argv, "--state", str(policy.parent / "state")], capture_output=True, text=True, env=environment, check=True
    )
    assert "the key was missing or wrong" in done.stderr, "before a change fails for it"
    assert "Until then no change will come about" in done.stderr
