"""A real Prometheus on loopback with the project's own configuration and rules, for the time of a block.

with scraping(folder, {"triton": "127.0.0.1:8002", "entry": "127.0.0.1:8102"}, every_s=1) as prometheus:
    prometheus.at("sum by (model) (rate(nv_inference_count[1m]))")      # [Series({"model": "ctr"}, [12.5])]
    prometheus.over("up", start_s, end_s, step_s=5)
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from perf import programs
from perf.frame import PROJECT
from tritonpilot.errors import MeasurementError
from tritonpilot.ports import choose_ports

CONFIG = PROJECT / "deploy" / "prometheus" / "prometheus.yml"
START_S = 30.0
ANSWER_S = 30.0


@dataclass(frozen=True)
class Series:
    """One line: its labels, and its values from first to last."""

    labels: Mapping[str, str]
    values: Sequence[float]


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    def at(self, expr: str, time_s: float | None = None) -> list[Series]:
        """An instant query, now or at a time. Raises MeasurementError when Prometheus refuses it."""
        found = self._get("query", query=expr, **({} if time_s is None else {"time": str(time_s)}))
        if found["resultType"] in ("scalar", "string"):
            return [Series({}, [float(found["result"][1])])]
        return [Series(each["metric"], [float(each["value"][1])]) for each in found["result"]]

    def over(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """A range query."""
        found = self._get("query_range", query=expr, start=str(start_s), end=str(end_s), step=str(step_s))
        return [Series(each["metric"], [float(value) for _, value in each["values"]]) for each in found["result"]]

    def label_values(self, label: str, selector: str) -> list[str]:
        """The values of a label of the series that are selected."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return found

    def wait_for(self, expr: str, within_s: float) -> list[Series]:
        """What the query finds as soon as it finds something. Raises MeasurementError when that takes longer."""
        deadline = time.monotonic() + within_s
        while not (found := self.at(expr)):
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"Prometheus found nothing for {expr} within {within_s:g} s. Nothing is reported. Look at {self.url}/targets."
                )
            time.sleep(0.2)
        return found

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise MeasurementError(
                f"Prometheus refuses {parameters.get('query', path)}: {json.load(error)['error']}. Nothing is reported."
            ) from None
        except OSError as error:
            raise MeasurementError(
                f"Prometheus at {self.url} does not answer: {error}. Nothing is reported."
            ) from error


@contextmanager
def scraping(folder: Path, targets: Mapping[str, str], every_s: float) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `targets` (job -> host:port) and evaluates all rules so often, with its files in `folder`.

    The other jobs and the Alertmanager of the project's configuration are left out. Raises MeasurementError when it does not start.
    """
    (port,) = choose_ports([0])
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    config = _written(folder, targets, every_s)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                programs.find("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_ready(prometheus, process, folder / "prometheus.log")
            yield prometheus
        finally:
            process.terminate()
            process.wait(timeout=30)


def _written(folder: Path, targets: Mapping[str, str], every_s: float) -> Path:
    every = f"{every_s:g}s"
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    known = {job["job_name"]: job for job in config["scrape_configs"]}
    kept = {key: value for key, value in config.items() if key != "alerting"}
    kept["global"] = {**config["global"], "scrape_interval": every, "evaluation_interval": every}
    kept["global"]["scrape_timeout"] = every
    kept["scrape_configs"] = [
        {
            **{key: value for key, value in known[job].items() if key not in ("dns_sd_configs", "relabel_configs")},
            "static_configs": [{"targets": [target]}],
        }
        for job, target in targets.items()
    ]
    (folder / "rules").mkdir()
    for pattern in config["rule_files"]:
        for path in CONFIG.parent.glob(pattern):
            rules = yaml.safe_load(path.read_text(encoding="utf-8"))
            groups = [{**group, "interval": every} for group in rules["groups"]]
            (folder / "rules" / path.name).write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    kept["rule_files"] = [str(folder / "rules" / "*.yml")]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(kept), encoding="utf-8")
    return path


def _wait_until_ready(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=1):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise MeasurementError(
                    f"Prometheus did not start: {' '.join(said) or error}. Nothing is reported. Check {CONFIG} with promtool."
                ) from error
        time.sleep(0.05)
