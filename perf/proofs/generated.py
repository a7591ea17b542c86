"""Is what we generate Triton's own format, complete enough that Triton has to guess nothing?"""

from __future__ import annotations

from perf.frame import PROJECT, Bench, Outcome
from perf.subjects import built
from tritonpilot import build, model_config, repository
from tritonpilot.errors import PilotError
from tritonpilot.server import EmbeddedServer


def strict_config_loads(bench: Bench) -> Outcome:
    """Share of the generated models that parse as ModelConfig and load with auto-completion disabled, one at a time."""
    failed: dict[str, str] = {}
    with built(bench.say) as root:
        probes = build.probe_inputs(PROJECT / "models", root)
        names = repository.models(root)
        for name in names:
            try:
                text = (root / name / "config.pbtxt").read_text(encoding="utf-8")
                model_config.parse(text, name)
                with EmbeddedServer(
                    root, models=[name], strict_config=True, probe_inputs=probes, on_progress=bench.say
                ):
                    bench.say(f"{name} loaded")
            except PilotError as error:
                failed[name] = str(error)
    return Outcome(
        (len(names) - len(failed)) / len(names), rounds=len(names), details={"models": names, "failed": failed}
    )
