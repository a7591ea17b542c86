"""Stand-in for Triton's C++ pytorch backend, on a server that lacks it: the same config.pbtxt, TorchScript and torch.export.

A Python-based backend: Triton runs this file for every model that says `backend: "pytorch"` or `platform:
"pytorch_libtorch"`. It gathers the requests of an execution into one run and splits the answers; requests whose trailing
shapes differ run in groups; a request that fails gets its error, its mates get answers. A GPU instance runs on the GPU that
Triton chose for it, in a process of its own (not tried on a GPU yet: pilotlib.torch_runner). What it reads from the config:
pilotlib.torch_parameters, and names as pilotlib.torch_names says. It completes no config, as Triton's does not.
"""

from collections.abc import Mapping, Sequence

from pilotlib import torch_config, torch_names
from pilotlib.blame import input_at_fault
from pilotlib.tensors import DTYPES_BY_CONFIG, Array
from pilotlib.torch_parameters import TorchParameters
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context

Item = list[Array]
"""One request's arrays in the order of the model's arguments."""
Result = list[Array]
"""One request's outputs in the order of the config."""


class Pytorch(Backend[TorchParameters, Item, Result]):
    """One instance of one model version."""

    parameters = TorchParameters
    ignores_unknown_parameters = True  # as Triton's
    checks_shapes = False  # as Triton's
    runs_on_gpu = True

    def set_up(self, context: Context[TorchParameters]) -> None:
        """Load the model; a ValueError names what is wrong with config or file."""
        # NOTE: PyTorch takes 2 s to import. Before it starts an instance, Triton runs this file in another process to
        # complete the config, which would wait for it in vain.
        import torch

        from pilotlib import torch_file, torch_switches
        from pilotlib.torch_runner import Outputs, TorchRunner, torch_type

        config = context.config
        torch_config.check(config)
        kinds = [group.get("kind", "") for group in config.get("instance_group", ())]
        device = torch_switches.choose_device(context.device, kinds, torch.version.cuda, torch.cuda.device_count())
        remarks = torch_switches.throw(torch_switches.decide(context.parameters, device, context.cores))

        names = torch_config.inputs_of(config)
        forward = torch_file.load(torch_file.model_path(config, context.version_folder), device, names)
        inputs = torch_names.input_places(names, forward.arguments, forward.argument_paths)
        self._output_names = tuple(entry["name"] for entry in config["output"])
        outputs = torch_names.output_places(self._output_names, forward.result_paths)
        if forward.outputs:
            torch_names.check_results(self._output_names, outputs, len(forward.outputs))
            torch_config.check_program(
                config,
                [(entry, forward.inputs[place]) for entry, place in zip(config["input"], inputs.indices, strict=False)]
                + [
                    (entry, forward.outputs[place])
                    for entry, place in zip(config["output"], outputs.indices, strict=True)
                ],
            )
        self._input_names = [names[inputs.indices.index(place)] for place in range(len(names))]
        self._is_batched = config["max_batch_size"] > 0
        self._is_grouped = any(int(dim) < 0 for entry in config["input"] for dim in entry["dims"])
        types = tuple(torch_type(DTYPES_BY_CONFIG[entry["data_type"]].numpy) for entry in config["output"])
        self._runner = TorchRunner(
            forward.call,
            torch_switches.execution(context.parameters, device),
            Outputs(self._output_names, outputs, types),
        )
        for remark in (*remarks, *forward.remarks, inputs.remark, outputs.remark):
            if remark:
                context.log(remark)

    def decode(self, inputs: Mapping[str, Array]) -> Item:
        """The arrays that forward() takes."""
        try:
            return [inputs[name] for name in self._input_names]
        except KeyError as error:
            raise BadRequest(str(error.args[0]), "the input is missing") from None

    def predict(self, items: Sequence[Item]) -> Sequence[Result]:
        """One run per group of equal trailing shapes; without a batch dimension one run per request."""
        if not self._is_batched:
            return [self._runner.run_alone(item) for item in items]
        if len(items) == 1:
            return self._run_one(items)
        if not self._is_grouped:
            return self._runner.run(items)
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for place, item in enumerate(items):
            groups.setdefault(tuple([array.shape[1:] for array in item]), []).append(place)
        results: list[Result] = [[]] * len(items)
        for places in groups.values():
            answers = self._runner.run([items[place] for place in places], is_fresh=len(groups) > 1)
            for place, answer in zip(places, answers, strict=True):
                results[place] = answer
        return results

    def _run_one(self, items: Sequence[Item]) -> Sequence[Result]:
        try:
            return self._runner.run(items)
        except (IndexError, RuntimeError) as error:
            name = input_at_fault(str(error), dict(zip(self._input_names, items[0], strict=True)))
            if name is None:
                raise
            raise BadRequest(name, str(error)) from None

    def encode(self, result: Result) -> Mapping[str, Array]:
        """The outputs by name."""
        return dict(zip(self._output_names, result, strict=True))

    def tear_down(self) -> None:
        """Release the model."""
        del self._runner  # the device's memory goes with this process


TritonPythonModel = triton_model(Pytorch)
