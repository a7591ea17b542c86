"""Queue delay, instances and class limits that follow the traffic of a running Triton: `tritonpilot autopilot`.

policy      the file that a person writes
controller  decides, purely: (policy, state, observation) -> (state, decision with its reason)
model       predicts what settings would bring, by simulation
"""
