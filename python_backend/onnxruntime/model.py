"""Stand-in for Triton's C++ onnxruntime backend, on a server that lacks it: CPU instances, the same config.pbtxt.

A Python-based backend: Triton runs this file for every model that says `backend: "onnxruntime"` or
`platform: "onnxruntime_onnx"`. It gathers the requests of an execution into one run and splits the answers; a request
that fails gets its error, its batch-mates get answers. With priority levels or a queue policy it also keeps the dynamic
batcher awake (pilotlib.waker). Requests whose deadline has passed are not run (pilotlib.intake). What it reads from the
config: pilotlib.parameters and pilotlib.onnx_session.
"""

import json
import os
from pathlib import Path

import triton_python_backend_utils as pb_utils

from pilotlib.bf16 import bits_from_dlpack, dlpack_from_bits
from pilotlib.blame import input_at_fault
from pilotlib.instance import settle
from pilotlib.intake import intake_of
from pilotlib.onnx_session import ModelFileError, OnnxSession, model_path, session_options
from pilotlib.optimized import open_session
from pilotlib.parameters import ParameterError, parse
from pilotlib.recorder import recorder_of
from pilotlib.rows import RowRunner
from pilotlib.signature import ContradictionError, check, complete, is_complete
from pilotlib.tensors import BF16, DTYPES_BY_CONFIG, STRING, text_from_bytes
from pilotlib.told import printable, text_of

REFUSALS = (ContradictionError, ModelFileError, ParameterError)


class TritonPythonModel:
    """One instance of one model version, in a process of its own."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        """Fill in what the config leaves open, from the model file, as Triton's C++ backend does."""
        config = auto_complete_model_config.as_dict()
        if is_complete(config):
            return auto_complete_model_config
        try:
            options, _ = session_options(config, parse(config.get("parameters", {}))[0], _core_count())
            session = OnnxSession(model_path(config, Path(pb_utils.get_model_dir())), options)
            complete(config, session.signature)
        except REFUSALS as error:
            raise pb_utils.TritonModelException(text_of(error)) from None
        return auto_complete_model_config

    def initialize(self, args):
        """Load the model; raises TritonModelException naming what is wrong with config or file."""
        config = json.loads(args["model_config"])
        name, version = args["model_name"], args["model_version"]
        if args["model_instance_kind"] == "GPU":
            raise pb_utils.TritonModelException(
                f'model "{name}" asks for a GPU instance, but this server runs the CPU stand-in for Triton\'s '
                "onnxruntime backend. Say `instance_group [{ kind: KIND_CPU }]`, or serve the model with NVIDIA's Triton "
                "container, whose onnxruntime backend uses GPUs."
            )
        try:
            parameters, remarks = parse(config.get("parameters", {}))
            options, more_remarks = session_options(config, parameters, _core_count())
            path = model_path(config, Path(args["model_repository"]) / version)
            session, even_more = open_session(path, config, parameters, options)
            check(config, session.signature)
            self._recorder = recorder_of(
                config,
                keep=parameters.pilot_record,
                path=parameters.pilot_record_file,
                drop=parameters.pilot_record_drop,
                instance=args["model_instance_name"],
                log=pb_utils.Logger.log_warn,
            )
        except REFUSALS as error:
            raise pb_utils.TritonModelException(text_of(error)) from None

        self._session = session
        self._has_batch_dimension = config["max_batch_size"] > 0
        self._inputs = [_Input(entry) for entry in _input_entries(config, session.signature)]
        self._input_names = [each.name for each in self._inputs]
        self._needs_decoding = any(each.dtype is BF16 or each.dtype is STRING for each in self._inputs)
        self._has_optional = any(each.is_optional for each in self._inputs)
        known = session.signature.inputs + session.signature.optional
        self._scalar_inputs = {spec.name for spec in known if not spec.dims}
        self._is_grouped = any(-1 in each.dims for each in self._inputs)
        outputs = config["output"]
        self._output_names = tuple(entry["name"] for entry in outputs)
        self._bf16_outputs = {entry["name"] for entry in outputs if entry["data_type"] == "TYPE_BF16"}
        self._runner = (
            RowRunner(session, self._input_names, self._output_names, config["max_batch_size"])
            if self._has_batch_dimension
            else None
        )
        self._is_plain = self._has_batch_dimension and not (
            self._needs_decoding or self._is_grouped or self._bf16_outputs or len(outputs) > 1
        )

        self._intake, more = intake_of(args, config, parameters)
        if args["model_instance_name"].endswith("_0"):
            for remark in remarks + more_remarks + even_more + more:
                pb_utils.Logger.log_warn(printable(f'model "{name}": {remark}'))
        settle()

    def execute(self, requests):
        """One response per request, in their order."""
        return self._intake.execute(requests, self._answer if self._recorder is None else self._answer_and_record)

    def finalize(self):
        """Release the session and end the waker's thread."""
        self._intake.stop()
        if self._recorder is not None:
            self._recorder.close()
        self._runner = self._session = None

    def _answer_and_record(self, requests):
        responses = self._answer(requests)
        for request, response in zip(requests, responses, strict=True):
            if not response.has_error():
                self._recorder.offer({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        return responses

    def _answer(self, requests):
        if self._is_plain:
            try:
                return self._answer_plainly(requests)
            except Exception:  # noqa: BLE001, S110  somebody's request is bad: the long way finds out whose
                pass
        responses = [None] * len(requests)
        if self._runner is None:
            for index, request in enumerate(requests):
                self._answer_alone(index, request, responses)
            return responses
        groups = {}
        for index, request in enumerate(requests):
            try:
                arrays = self._read(request)
            except (KeyError, UnicodeDecodeError) as error:
                responses[index] = self._refusal(error)
                continue
            key = tuple([array.shape[1:] for array in arrays]) if self._is_grouped else None
            groups.setdefault(key, []).append((index, arrays, self._wanted(request)))
        for group in groups.values():
            self._answer_together(group, responses, len(groups) > 1)
        return responses

    def _answer_plainly(self, requests):
        """What most models need, with nothing to choose: numbers of fixed shapes, one output. Half the Python of the long way."""
        input_names, names = self._input_names, self._output_names
        gathered = []
        for request in requests:
            found = {tensor.name(): tensor for tensor in request.inputs()}
            gathered.append([found[name].as_numpy() for name in input_names])
        (name,) = names
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name, output)])
            for (output,) in self._runner.run(gathered, names)
        ]

    def _answer_together(self, group, responses, is_fresh):
        names = self._output_names
        if any(wanted is not names for _, _, wanted in group):
            names = tuple(name for name in names if any(name in wanted for _, _, wanted in group))
        try:
            answers = self._runner.run([arrays for _, arrays, _ in group], names, is_fresh)
        except Exception as error:  # noqa: BLE001  one request must not spoil its mates: halve until it is alone
            if len(group) == 1:
                index, arrays, _ = group[0]
                responses[index] = self._refusal(error, dict(zip(self._input_names, arrays, strict=True)))
                return
            middle = len(group) // 2
            self._answer_together(group[:middle], responses, True)
            self._answer_together(group[middle:], responses, True)
            return
        for (index, _, wanted), outputs in zip(group, answers, strict=True):
            responses[index] = pb_utils.InferenceResponse(
                [self._tensor(name, output) for name, output in zip(names, outputs, strict=True) if name in wanted]
            )

    def _answer_alone(self, index, request, responses):
        try:
            tensors = request.inputs()
            inputs = {each.name: each for each in self._inputs}
            feeds = {tensor.name(): inputs[tensor.name()].read(tensor) for tensor in tensors}
            for name in self._scalar_inputs & feeds.keys():
                feeds[name] = feeds[name].reshape(())
            names = self._wanted(request)
            outputs = self._session.run(names, feeds)
        except Exception as error:  # noqa: BLE001  this request's error is its answer, others follow
            responses[index] = self._refusal(error)
            return
        responses[index] = pb_utils.InferenceResponse(
            [
                self._tensor(name, output if output.ndim else output.reshape(1))
                for name, output in zip(names, outputs, strict=True)
            ]
        )

    def _read(self, request):
        tensors = request.inputs()
        found = {tensor.name(): tensor for tensor in tensors}
        if self._needs_decoding:
            return [each.read(found[each.name]) for each in self._inputs]
        return [found[name].as_numpy() for name in self._input_names]

    def _wanted(self, request):
        names = self._output_names
        if len(names) == 1:
            return names
        asked = request.requested_output_names()
        if len(asked) == len(names):
            return names
        return tuple([name for name in names if name in asked])

    def _tensor(self, name, output):
        if name in self._bf16_outputs:
            return pb_utils.Tensor.from_dlpack(name, dlpack_from_bits(output))
        return pb_utils.Tensor(name, output)

    def _refusal(self, error, inputs=None):
        if isinstance(error, KeyError):
            error = ValueError(f"input {error} is missing")
        said = f"onnxruntime: {text_of(error)}"
        if inputs is not None and (name := input_at_fault(said, inputs)) is not None:
            said = f'"{name}": {said}'
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(said, pb_utils.TritonError.INVALID_ARG))


class _Input:
    """How one input of the config is read from a request's tensor."""

    def __init__(self, entry):
        self.name = entry["name"]
        self.dtype = DTYPES_BY_CONFIG[entry["data_type"]]
        self.is_optional = entry.get("optional", False)
        self.dims = [int(dim) for dim in entry["dims"]]

    def read(self, tensor):
        """The numpy array that the session takes. Raises UnicodeDecodeError for a string that is not UTF-8."""
        if self.dtype is BF16:
            return bits_from_dlpack(tensor.to_dlpack())
        if self.dtype is STRING:
            return text_from_bytes(tensor.as_numpy())
        return tensor.as_numpy()


def _input_entries(config, signature):
    """The config's inputs, and the sequence controls that the model takes as inputs."""
    named = {entry["name"] for entry in config["input"]}
    controls = [
        {"name": spec.name, "data_type": spec.dtype.config, "dims": [1]}
        for spec in signature.inputs
        if spec.name not in named
    ]
    return config["input"] + controls


def _core_count():
    return len(os.sched_getaffinity(0))
