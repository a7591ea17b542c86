"""How does an FP32 ONNX model become an INT8 or FP16 one, and what proves that its answers are still right?

    options = qdq.QdqOptions.for_cpu(model)
    qdq.quantize_static(model, rows, Path("model.int8.onnx"), options)   # rows: data.read(...), chosen by coverage.choose(...)

Calibration rows come from `data` and are chosen by `coverage`; `qdq` and `floats` write models; `accuracy` and `speed` judge them;
`search` looks for the nodes that are better left in FP32; `run` does all of it; `manifest` keeps what was done.
"""
