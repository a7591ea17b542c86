"""Which Triton models does a service become? One, or for a pipeline one for each step and one that callers name.

    [part.service for part in parts(service)]      -> ["image_decode", "image_net", "image_labels", "image"]

Every part is a service of its own, so whatever holds for services holds for steps: classes, queue limits and timeouts
are the same on every composing model, because Triton checks them in each queue anew. The queue delay is what a request
may wait for company in all, so each step gets its share (docs/adr/0009-pipelines.md).
"""

from __future__ import annotations

from tritonpilot.spec import Model, Pipeline, Service, Step, int8_file


def parts(service: Service) -> list[Service]:
    """The services that the models of a service come from, steps first; other services that it names are not among them.

    The last one has the service's own name. For an ensemble it keeps `pipeline`; a driver's has a `model`. A model that is
    published as INT8 `beside` comes twice.
    """
    return [each for part in _parts(service) for each in (*_beside(part), part)]


def _beside(part: Service) -> list[Service]:
    """The INT8 model of a part, where it is served under a name of its own."""
    model = part.model
    if model is None or model.quantize is None or model.quantize.publish != "beside":
        return []
    twin = model.model_copy(update={"file": int8_file(str(model.file)), "quantize": None, "prepare": None})
    return [part.model_copy(update={"service": f"{part.service}_int8", "model": twin})]


def _parts(service: Service) -> list[Service]:
    pipeline = service.pipeline
    if pipeline is None:
        return [service]
    own = [step for step in pipeline.steps if step.model is not None]
    share_us = service.batching.queue_delay_us // (len(own) + (pipeline.driver is not None) or 1)
    batching = service.batching.model_copy(update={"queue_delay_us": share_us})
    found = [
        _part(
            service,
            f"{service.service}_{step.name}",
            pipeline,
            step.model,
            batching=step.batching or batching,
            instances=step.instances or list(Service.model_fields["instances"].default),
            warmup=step.warmup,
            tracing=None,  # a request is sampled once, where it comes in,
            cache=None,  # and cached
            guard=None,  # and looked at there
        )
        for step in own
        if step.model is not None
    ]
    if pipeline.driver is None:
        return [*found, service]
    steps = {step.label: step_model(service, step) for step in pipeline.steps}
    driver = pipeline.driver.model_copy(
        update={
            "parameters": {**pipeline.driver.parameters, **steps, "pilot_steps": ",".join(steps.values())},
            "samples": pipeline.samples,
            "inputs": pipeline.inputs,
            "outputs": pipeline.outputs,
        }
    )
    return [*found, _part(service, service.service, pipeline, driver, batching=batching)]


def step_model(service: Service, step: Step) -> str:
    """The Triton name of a step's model."""
    return step.service or f"{service.service}_{step.name}"


def _part(service: Service, name: str, pipeline: Pipeline, model: Model, **changes: object) -> Service:
    if model.prepare is None:
        model = model.model_copy(update={"prepare": pipeline.prepare})
    return service.model_copy(update={"service": name, "pipeline": None, "model": model, **changes})
