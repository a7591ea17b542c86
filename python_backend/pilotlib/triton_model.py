"""How does Triton run a backend of four verbs (pilotlib.verbs)? As the class that its Python stub looks for in model.py:

    TritonPythonModel = triton_model(Length)

It sets the backend up, reads requests into arrays, answers each with its outputs or its own error, calls other models for
it (BLS), and lets neither late requests nor wakes through to it (pilotlib.intake). What it costs beside the backend's own
verbs: 10 to 20 us a request, most of them in Triton's objects.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pilotlib import instance
from pilotlib.bf16 import bits_from_dlpack, dlpack_from_bits
from pilotlib.deadlines import DEADLINE_PARAMETER, LATE
from pilotlib.intake import Intake, intake_of
from pilotlib.recorder import recorder_of
from pilotlib.stub import pb_utils
from pilotlib.tensors import Array
from pilotlib.told import printable, text_of
from pilotlib.verbs import Backend, BadRequest, InferError, LateError, answers, forget_frames, told

FAULTS_LOGGED = 32  # different faults of a backend's code that get a traceback in the log, per instance


def triton_model(backend_class: type[Backend[Any, Any, Any]]) -> type:
    """The class that Triton's stub instantiates once per instance of a model."""
    return type(
        "TritonPythonModel", (_TritonModel,), {"backend_class": backend_class, "__doc__": backend_class.__doc__}
    )


class _TritonModel:
    """One instance of one model version, in a process of its own."""

    backend_class: type[Backend[Any, Any, Any]]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Set the backend up; raises TritonModelException naming what is wrong with config or files."""
        config = json.loads(args["model_config"])
        model, version = args["model_name"], args["model_version"]
        self._prefix = f'model "{model}": '
        self._faults: set[str] = set()
        self._requests: Sequence[Any] = ()  # that are being answered
        self._intake = Intake(None, lambda late: None)  # noqa: ARG005  nothing is taken in yet
        try:
            self._backend, common, remarks = instance.set_up(
                self.backend_class,
                config,
                model=model,
                version=int(version),
                version_folder=Path(args["model_repository"], version),
                infer=self._infer,
                device=_device(self.backend_class, args, config.get("backend", "")),
                log=self._warn,
                name=args["model_instance_name"],
            )
            self._recorder = recorder_of(
                config,
                keep=common.pilot_record,
                path=common.pilot_record_file,
                drop=common.pilot_record_drop,
                instance=args["model_instance_name"],
                log=self._warn,
            )
        except (ValueError, OSError) as error:
            raise pb_utils.TritonModelException(f"{self._prefix}{text_of(error)}") from None
        self._versions = _versions(common.pilot_step_versions)
        self._outputs = instance.Outputs(config, checks_shapes=self.backend_class.checks_shapes)
        self._bf16_inputs = {entry["name"] for entry in config["input"] if entry["data_type"] == "TYPE_BF16"}
        self._intake, more_remarks = intake_of(args, config, common)
        if args["model_instance_name"].endswith("_0"):
            for remark in remarks + more_remarks:
                self._warn(remark)
        instance.settle()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in their order."""
        return self._intake.execute(requests, self._answer)

    def finalize(self) -> None:
        """End the waker and give back what the backend took."""
        self._intake.stop()
        self._backend.tear_down()
        if self._recorder is not None:
            self._recorder.close()

    def _answer(self, requests: Sequence[Any]) -> list[Any]:
        read = [self._read(request) for request in requests]
        rows = [
            instance.UNKNOWN if isinstance(inputs, BadRequest) else self._outputs.rows_of(inputs) for inputs in read
        ]
        self._requests = requests
        try:
            found = answers(self._backend, read)
        finally:
            self._requests = ()
        if self._recorder is not None:
            for inputs, answer in zip(read, found, strict=True):
                if not isinstance(inputs, BadRequest) and not isinstance(answer, BaseException):
                    self._recorder.offer(inputs)
        del read  # views of Triton's memory
        if late := sum(isinstance(answer, LateError) for answer in found):
            self._intake.count_late(late)
        return [
            self._response(request, count, answer) for request, count, answer in zip(requests, rows, found, strict=True)
        ]

    def _read(self, request: Any) -> dict[str, Array] | BadRequest:
        arrays = {}
        for tensor in request.inputs():
            name = tensor.name()
            try:
                arrays[name] = bits_from_dlpack(tensor.to_dlpack()) if name in self._bf16_inputs else tensor.as_numpy()
            except Exception as error:  # noqa: BLE001  Triton's objects raise bare exceptions for bytes they cannot read
                return BadRequest(name, f"cannot be read: {text_of(error)}")
        return arrays

    def _response(self, request: Any, rows: int, answer: Mapping[str, Array] | BaseException) -> Any:
        if isinstance(answer, BaseException):
            refusal = self._refusal(answer)
            forget_frames(answer)
            return refusal
        names = self._outputs.names
        if len(names) > 1:
            asked = request.requested_output_names()
            names = names if len(asked) == len(names) else tuple([name for name in names if name in asked])
        try:
            tensors = self._outputs.checked(answer, names, rows)
            return pb_utils.InferenceResponse([self._tensor(name, array) for name, array in tensors.items()])
        except Exception as error:  # noqa: BLE001  this request's error is its answer; its mates get theirs
            return self._refusal(error)

    def _tensor(self, name: str, array: Array) -> Any:
        if name in self._outputs.bf16:
            return pb_utils.Tensor.from_dlpack(name, dlpack_from_bits(array))
        return pb_utils.Tensor(name, array)

    def _refusal(self, error: BaseException) -> Any:
        text, code = told(error), pb_utils.TritonError.INTERNAL
        if isinstance(error, BadRequest):
            code = pb_utils.TritonError.INVALID_ARG
        elif isinstance(error, LateError):
            code = pb_utils.TritonError.UNAVAILABLE
        elif not isinstance(error, InferError):
            self._log_fault(error)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))

    def _log_fault(self, error: BaseException) -> None:
        """A fault in the backend's code, where it happened; each place once."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{type(error).__name__} in {frames[-1].filename}:{frames[-1].lineno}" if frames else told(error)
        if place not in self._faults and len(self._faults) < FAULTS_LOGGED:
            self._faults.add(place)
            self._warn(
                "a request failed (the next ones of this kind are not logged)\n"
                + "".join(traceback.format_exception(error))
            )

    def _infer(self, model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """The named outputs of another model of this server, copied. Raises InferError with that model's error.

        May be called by several threads at once, within `execute` only: before, the server does not listen to a stub.
        BF16 is a matter of the callee's config, which is not seen here: uint16 arrays are sent as UINT16.
        When all requests of this execution state a deadline, the callee is told the latest, and is not called after it.
        Its spans belong to the trace of the first traced request of this execution: a span has one parent.
        """
        latest_ns = self._intake.latest_ns
        if self._intake.is_over():
            raise LateError(LATE)
        try:
            trace = _trace_of(self._requests)
            response = pb_utils.InferenceRequest(
                model_name=model,
                model_version=self._versions.get(model, -1),
                requested_output_names=list(outputs),
                inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
                parameters={} if latest_ns is None else {DEADLINE_PARAMETER: latest_ns},
                **({} if trace is None else {"trace": trace}),
            ).exec()
        except Exception as error:  # the stub raises bare exceptions: an unknown model, a call outside of execute
            raise InferError(f'model "{model}" could not be called: {error}') from error
        if response.has_error():
            said = response.error().message()
            raise LateError(said) if LATE in said else InferError(f'model "{model}": {said}')
        # Copied: an array of a BLS answer lies in shared memory that is given back with its response.
        return {tensor.name(): tensor.as_numpy().copy() for tensor in response.output_tensors()}

    def _warn(self, line: str) -> None:
        pb_utils.Logger.log_warn(printable(self._prefix + line))


def _versions(stated: str) -> dict[str, int]:
    """Which versions of other models are called, by their names; of those that are not there Triton takes the highest."""
    pairs = (pair.rpartition(":") for pair in stated.split(",") if pair)
    return {name: int(version) for name, _, version in pairs}


def _trace_of(requests: Sequence[Any]) -> Any:
    """The trace of the first request that has one (OpenTelemetry mode), None without."""
    traces = (request.trace() for request in requests)
    return next((trace for trace in traces if trace.get_context() is not None), None)


def _device(backend_class: type[Backend[Any, Any, Any]], args: Mapping[str, str], backend: str) -> str:
    if args["model_instance_kind"] != "GPU":
        return "cpu"
    if not backend_class.runs_on_gpu:
        raise ValueError(
            f'config.pbtxt asks for a GPU instance, but the backend "{backend or "python"}" runs on the CPU. The model is '
            "not loaded: say `instance_group [{ kind: KIND_CPU }]`"
        )
    return f"cuda:{args['model_instance_device_id']}"
