"""The registry of proofs: a name, how it is proved, and the bar."""

from __future__ import annotations

from perf.frame import Bar, Claim
from perf.proofs import (
    accuracy,
    alerts,
    autopilot_chaos,
    autopilot_day,
    autopilot_phases,
    bad_inputs,
    balancer,
    batching,
    cache,
    changes,
    chart,
    client,
    cold_start,
    compose_e2e,
    conformance,
    dashboards,
    deadlines,
    demo,
    efficiency,
    entry_cost,
    generated,
    guard_detects,
    heal_stub,
    image,
    int8,
    loadgen,
    locust,
    memory,
    model_analyzer,
    ocr,
    priorities,
    scheduling,
    simulator,
    simulator_error,
    single_row,
    stall,
    stranger,
    swap_50,
    swap_kill,
    swap_refuses_bad,
    text,
    transports,
    tuning,
    waker_cost,
)

CLAIMS = {
    claim.name: claim
    for claim in (
        Claim("ctr_auc", accuracy.ctr_auc, "AUC", Bar(">=", 0.74), "AUC of served ctr answers on the temporal test split"),
        Claim("image_top1", accuracy.image_top1, "of 20 photos", Bar(">=", 17), "labelled photos that image names first, sent as "
              "JPEG bytes over gRPC and HTTP"),
        Claim("ocr_lines", ocr.ocr_lines, "of lines", Bar(">=", 1), "share of 31 known lines on three pages that ocr reads within "
              "the documented tolerance, over gRPC and HTTP"),
        Claim("served_equals_inprocess", accuracy.served_equals_inprocess, "max abs difference", Bar("<=", 1e-5),
              "served answers against in-process ONNX Runtime, at fixed and mixed sizes in flight"),
        Claim("mean_batch", batching.mean_batch, "rows", Bar(">", 4), "mean executed batch of 1000 one-row ctr requests, "
              "64 in flight", needs_quiet=True),
        Claim("priority_overtakes", priorities.priority_overtakes, "of 10 trials", Bar(">=", 10), "trials in which a "
              "realtime request overtook all of at least 200 waiting batch requests", needs_quiet=True),
        Claim("stall_pairs", stall.stall_pairs, "pairs", Bar("<=", 0), "pairs 15 ms apart on a 50 ms model with "
              "priorities that took more than 150 ms", needs_quiet=True),
        Claim("ctr64_efficiency", efficiency.ctr64_efficiency, "of in-process", Bar(">=", 0.85), "rows per CPU second of "
              "served 64-row ctr requests at saturation, against ONNX Runtime alone", needs_quiet=True),
        Claim("image_efficiency", image.image_efficiency, "of in-process", Bar(">=", 0.9), "rows per CPU second of served one-row "
              "image_net tensors at saturation, against ONNX Runtime alone", needs_quiet=True),
        Claim("jpeg_efficiency", image.jpeg_efficiency, "of a plain loop", Bar(">=", 0.85), "photos per CPU second from JPEG "
              "bytes to labels through the pipeline image, against Pillow and ONNX Runtime in one process", needs_quiet=True),
        Claim("text_batch_mates", text.text_batch_mates, "max abs difference", Bar("<=", 1e-5), "served embeddings of texts in "
              "mixed batches in flight, against each text alone through tokenizers and ONNX Runtime in process"),
        Claim("text_efficiency", text.text_efficiency, "of in-process", Bar(">=", 0.9), "texts per CPU second from strings through "
              "the pipeline text, 16 a request, against tokenizers and ONNX Runtime in one process", needs_quiet=True),
        Claim("client_coalescing", client.client_coalescing, "of plain requests", Bar(">=", 2.5), "rows per CPU second of the "
              "server for one-row ctr calls of 64 callers through tritonpilot.client, against tritonclient", needs_quiet=True),
        Claim("transports_agree", transports.transports_agree, "max abs difference", Bar("<=", 0), "the same requests to every "
              "example service by HTTP JSON, HTTP binary, gRPC, shared memory and the client"),
        Claim("single_row_cost", single_row.single_row_cost, "calls in process", Bar("<=", 2), "CPU time of a single-row ctr "
              "request over HTTP, tritonserver and stub together, against a batch-1 call of ONNX Runtime; gRPC and the "
              "breakdown in the details", needs_quiet=True),
        Claim("onnx_conformance", conformance.onnx_conformance, "of cases", Bar(">=", 1), "share of at least 300 of ONNX's own "
              "conformance cases right in process that the onnxruntime stand-in answers as expected in the real Triton"),
        Claim("memory_flat", memory.memory_flat, "MB per 100,000 requests", Bar("<", 1), "largest growth of resident memory, of "
              "tritonserver and of every stub, under 200,000 mixed requests through each backend after as many for warm-up"),
        Claim("bad_inputs_isolated", bad_inputs.bad_inputs_isolated, "cases", Bar("<=", 0), "bad requests to any example model "
              "after which something crashed, a good request beside it suffered, or the error named no field"),
        Claim("stall_poisson", scheduling.stall_poisson, "of P99 without levels", Bar("<=", 1.15), "P99 of a 20 ms model under "
              "Poisson load of 30 % with three classes and bounded queues; none of 2000 requests takes 150 ms", needs_quiet=True),
        Claim("starvation", scheduling.starvation, "of all answers", Bar(">=", 0.08), "what 2 callers of a class with share 0.1 "
              "get through the entry beside 12 saturating ones of a better class, whose P99 stays within 1.25", needs_quiet=True),
        Claim("mixed_overload", scheduling.mixed_overload, "of capacity", Bar(">=", 0.95), "goodput at 1.5 times the capacity, "
              "through the entry; 99.5 % of the high class within its SLO, rejections within 20 ms", needs_quiet=True),
        Claim("noisy_neighbour", scheduling.noisy_neighbour, "of P99 alone", Bar("<=", 1.2), "P99 of a tenant while another of the "
              "same class sends ten times its quota; no error for the first", needs_quiet=True),
        Claim("deadlines", deadlines.deadlines, "ms after an execution", Bar("<=", 0), "how much later than its deadline and one "
              "execution the last of 10,000 answers with random deadlines was computed; callers hear of it in 20 ms, none is lost"),
        Claim("waker_cost", waker_cost.waker_cost, "% of a core", Bar("<", 1), "largest part of a core that waking a 20 ms model "
              "takes, by our backends' waker and by the companion, idle, at 30 % and saturated", needs_quiet=True),
        Claim("entry_cost", entry_cost.entry_cost, "of a direct request", Bar("<=", 2), "CPU time of a single-row ctr request over "
              "HTTP through the entry, entry and server together; 64 rows in the details", needs_quiet=True),
        Claim("strict_config_loads", generated.strict_config_loads, "of models", Bar(">=", 1), "share of generated models "
              "that parse and load with auto-completion off"),
        Claim("int8_ctr", int8.int8_ctr, "of FP32", Bar(">=", 2.5), "rows per CPU second of INT8 ctr at batch 64; AUC loss "
              "within 0.2 %, file at most 0.35 of FP32", needs_quiet=True),
        Claim("int8_image", int8.int8_image, "of FP32", Bar(">=", 2), "rows per CPU second of the INT8 image network; its first "
              "class is FP32's for 98 % of 220 views", needs_quiet=True),
        Claim("int8_text", int8.int8_text, "of FP32", Bar(">=", 1.5), "rows per CPU second of the INT8 text network; Pearson loss "
              "within 1 %, mean cosine 0.99", needs_quiet=True),
        Claim("int8_risk", int8.int8_risk, "relative AUC loss", Bar("<", 0.002), "loss of the INT8 credit network, test split"),
        Claim("int8_ocr", int8.int8_ocr, "of lines", Bar(">=", 1), "known lines that OCR reads as before with the chosen networks"),
        Claim("compensation_text", int8.compensation_text, "mean cosine", Bar(">=", 0.99), "answers of the INT8 MiniLM that the "
              "search finds by itself, against FP32"),
        Claim("coverage_refusal", int8.coverage_refusal, "of one-sided sets", Bar(">=", 1), "calibration sets of one hour, grade "
              "or state that are refused, with the features named; covering sets pass"),
        Claim("int8_served", int8.int8_served, "of FP32", Bar(">=", 1.5), "answers per second within the SLO of the INT8 image "
              "network served by Triton", needs_quiet=True),
        Claim("compose_e2e", compose_e2e.compose_e2e, "s", Bar("<", 30), "until every service of docker-compose.yml is healthy, on "
              "images that are there"),
        Claim("alerts", alerts.alerts, "s", Bar("<=", 60), "until the last alert of a slow model, a flood and a killed stub fired, "
              "or was resolved after its end, under a real Prometheus with the deployed rules"),
        Claim("dashboards", dashboards.dashboards, "of queries", Bar(">=", 1), "share of the dashboards' queries that return "
              "data of a real Triton, entry and watch from a real Prometheus, those for GPUs apart"),
        Claim("locust_constant", locust.locust_constant, "ms", Bar("<", 50), "P99 of 100 ctr requests a second for 5 minutes by "
              "Locust through the entry; at most 0.02 % fail", needs_quiet=True),
        Claim("locust_burst", locust.locust_burst, "s", Bar("<=", 5), "from a step of 0 to 500 requests a second until P99 is "
              "below 50 ms again; no error for the class realtime", needs_quiet=True),
        Claim("stranger_locked_out", stranger.stranger_locked_out, "attempts", Bar("<=", 0), "attempts without the key, over "
              "HTTP and gRPC, to load, unload, register memory or change settings that got through"),
        Claim("balancer_kill", balancer.balancer_kill, "s", Bar("<=", 5), "from kill -9 of one of three Tritons behind the "
              "balancer until P99 is within 1.5 times what it was; no call that may be sent again fails", needs_quiet=True),
        Claim("loadgen_honesty", loadgen.loadgen_honesty, "of checks", Bar(">=", 1), "`tritonpilot load`: a pause of 2 s shows "
              "fully, it sends within 1 ms of the schedule, 5,000 a second over HTTP, and agrees with perf_analyzer",
              needs_quiet=True),
        Claim("simulator_speed", simulator.simulator_speed, "million requests/s", Bar(">=", 1), "requests that the simulator "
              "of Triton's batcher simulates in a second", needs_quiet=True),
        Claim("simulator_error", simulator_error.simulator_error, "median error of P99", Bar("<=", 0.15), "simulated P99 against "
              "the real server's, 32 random settings and loads of `ctr` and an emulated GPU; throughput within 5 %",
              needs_quiet=True),
        Claim("tuner_regret", tuning.tuner_regret, "of the grid's best", Bar(">=", 0.97), "goodput of the tuner's choice against "
              "the best of a grid on the real server, worst of four services; at most a tenth of the grid's measuring time",
              needs_quiet=True),
        Claim("tuner_follows_slo", tuning.tuner_follows_slo, "times the goodput", Bar(">", 1), "goodput of what is chosen for 100 "
              "ms against what is chosen for 20 ms, on the real server; on an emulated accelerator batches grow", needs_quiet=True),
        Claim("tuner_vs_model_analyzer", model_analyzer.tuner_vs_model_analyzer, "of Model Analyzer's goodput", Bar(">", 1),
              "goodput of the tuner's choice for an emulated V100 within 50 ms, on the real server, against that of Model "
              "Analyzer's quick search; at least 5 times sooner", needs_quiet=True),
        Claim("autopilot_day", autopilot_day.autopilot_day, "of requests", Bar(">=", 0.999), "answered within 100 ms on an "
              "emulated V100 through a real day in 4 minutes with bursts; as good as the best static setting with hindsight, for "
              "at most 75 % of its instance time, and 3 times fewer missed than with the worst reasonable one", needs_quiet=True),
        Claim("autopilot_phases", autopilot_phases.autopilot_phases, "of the best static", Bar(">=", 0.98), "goodput of `ctr` "
              "under the autopilot, from 30 s after each shift, in the worst of four phases of traffic", needs_quiet=True),
        Claim("changes_under_load", changes.changes_under_load, "of steady P99", Bar("<=", 1.5), "P99 of `ctr` while instances "
              "come and go and its delay changes, 100 times, against nobody touching it; none fails, each verified within 5 s",
              needs_quiet=True),
        Claim("helm_valid", chart.helm_valid, "problems", Bar("<=", 0), "problems that helm lint --strict, the strict schemas of "
              "Kubernetes 1.25 to 1.37 and KEDA's types find in what the helm chart makes of four sets of values"),
        Claim("autopilot_chaos", autopilot_chaos.autopilot_chaos, "faults", Bar("<=", 0), "of seven (Triton and autopilot killed, "
              "Prometheus cut, metrics frozen, settings changed, model unloaded, policy broken) in which something was changed "
              "that must not be, a request was lost, or the settings did not come back"),
        Claim("swap_50", swap_50.swap_50, "of steady P99", Bar("<=", 1.5), "P99 of calls during 50 swaps in a row, against "
              "that of the times between, over HTTP and gRPC; none fails, each answer is of one version, memory comes back",
              needs_quiet=True),
        Claim("swap_refuses_bad", swap_refuses_bad.swap_refuses_bad, "attempts", Bar("<=", 0), "attempts to swap in a bad model "
              "(wrong shape, NaN, swapped classes, 3 times the work, corrupt, crash in warm-up, wrong checksum) that were let "
              "through, hurt a caller or left something behind"),
        Claim("swap_kill_each_step", swap_kill.swap_kill_each_step, "kills", Bar("<=", 0), "kill -9 of `tritonpilot swap` at each "
              "step after which a call failed, a restart did not serve one whole version, or a re-run did not bring order"),
        Claim("guard_detects", guard_detects.guard_detects, "requests", Bar("<=", 10_000), "until a model that errs in one of 1000 "
              "executions is found, at most, of inputs that differ and that repeat; an alert of a drift within 60 s, none in "
              "an hour of a real day"),
        Claim("cache_lfu", cache.cache_lfu, "of LRU's hit ratio", Bar(">", 1), "hit ratio of the entry's cache on 100,000 recorded "
              "requests, a tenth of the answers fits, against LRU's; a hit of `text` takes at most half as long, no stale answer "
              "in swaps under load, no tenant gets another's", needs_quiet=True),
        Claim("cold_start", cold_start.cold_start, "of a later request", Bar("<=", 1.2), "the first request after a start against "
              "the P50 of later ones, slowest example; how long each takes from the command to its first answer, before and now",
              needs_quiet=True),
        Claim("heal_stub", heal_stub.heal_stub, "s", Bar("<", 3), "from kill -9 of a stub under load to the next answer, longest "
              "of 24 kills in 10 minutes; only requests in that stub fail, the alert fires, and a stub stopped for 3 s, which "
              "aborts the server, costs less than 5 s", needs_quiet=True),
        Claim("demo_time", demo.demo_time, "s", Bar("<", 600), "seconds of `make demo` in a fresh clone with an empty home; "
              "its second run under 60 s"),
    )
}  # fmt: skip

#: Claims that are not proved yet, and why; the README says so too. An entry goes when its result reaches the bar.
OPEN = {
    "heal_stub": "its full run is to come",
    "swap_50": "its full run is to come",
    "swap_refuses_bad": "its full run is to come",
    "swap_kill_each_step": "its full run is to come",
    "guard_detects": "its full run is to come",
    "cold_start": "its full run is to come",
    "tuner_regret": "its full run is to come",
    "tuner_vs_model_analyzer": "its run is to come",
}
