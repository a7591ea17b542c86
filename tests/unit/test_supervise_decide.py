"""What is done about a dead stub, a hung one, a model that cannot be healed, and a server that is gone."""

from __future__ import annotations

from tritonpilot.supervise.decide import Decision, Policy, Seen, State, Trouble, decide, failed, healed, restarted

POLICY = Policy()
DEAD = {"ctr": Trouble("dead", "its stub ctr_0_0 died")}


def test_a_dead_stub_has_its_model_reloaded_at_once_and_alone() -> None:
    state, decision = decide(POLICY, State(), Seen(0.0, unwell=DEAD))

    assert decision == Decision("reload", "ctr", "ctr is dead: its stub ctr_0_0 died")
    assert decide(POLICY, state, Seen(0.0))[1].action == "none"


def test_a_stub_that_is_killed_every_25_s_is_replaced_each_time_without_a_wait_or_a_restart() -> None:
    state = State()
    for kill in range(24):
        at_s = 25.0 * kill
        state, decision = decide(POLICY, state, Seen(at_s, unwell=DEAD))
        assert decision.action == "reload", kill
        state = healed(state, "ctr", at_s + 1)


def test_a_stub_that_dies_again_at_once_is_replaced_ever_later() -> None:
    state, at_s, waits = State(), 0.0, []
    for _ in range(9):
        died_s = at_s
        while True:
            state, decision = decide(POLICY, state, Seen(at_s, unwell=DEAD))
            if decision.action == "reload":
                break
            at_s += 0.5
        waits.append(at_s - died_s)
        state = healed(state, "ctr", at_s)
        at_s += 0.5

    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_three_reloads_in_vain_lead_to_a_restart_and_after_it_to_reloads_alone_for_ten_minutes() -> None:
    state, at_s, actions = State(), 0.0, []
    while at_s < POLICY.window_s:
        state, decision = decide(POLICY, state, Seen(at_s, unwell=DEAD))
        if decision.action == "reload":
            state = failed(POLICY, state, "ctr", at_s)
        elif decision.action == "restart":
            state = restarted(POLICY, state, at_s, is_up=True)
        if decision.action != "none":
            actions.append(decision.action)
        at_s += 0.5

    assert actions[:4] == ["reload", "reload", "reload", "restart"]
    assert set(actions[4:]) == {"reload"}


def test_a_model_that_answers_with_errors_never_costs_the_others_a_restart() -> None:
    state, actions = State(), set()
    for second in range(2000):
        unwell = {"ctr": Trouble("failing", "CUDA error")}
        state, decision = decide(POLICY, state, Seen(float(second), unwell=unwell))
        if decision.action == "reload":
            state = failed(POLICY, state, "ctr", float(second))
        actions.add(decision.action)

    assert actions == {"none", "reload"}


def test_one_model_that_waits_does_not_hold_up_another() -> None:
    state = failed(POLICY, State(), "ctr", 0.0)
    both = {**DEAD, "text": Trouble("hung", "Deadline Exceeded")}

    assert decide(POLICY, state, Seen(0.1, unwell=both))[1].model == "text"


def test_a_server_that_dies_is_restarted_at_once_then_ever_later_and_given_up_after_ten_times() -> None:
    state, at_s, waits = State(), 0.0, []
    while True:
        died_s = at_s
        while (decision := decide(POLICY, state, Seen(at_s, "it died by SIGABRT"))[1]).action == "none":
            at_s += 0.5
        if decision.action == "give_up":
            break
        waits.append(at_s - died_s)
        state = restarted(POLICY, state, at_s, is_up=True)

    assert waits[:4] == [0, 0, 1, 2]
    assert len(waits) == POLICY.restarts_most
    assert "restarted 10 times in 600 s" in decision.reason


def test_a_restart_that_fails_is_not_repeated_at_once() -> None:
    state = restarted(POLICY, State(), 0.0, is_up=False)

    assert decide(POLICY, state, Seen(0.5, "no port"))[1].action == "none"
    assert decide(POLICY, state, Seen(1.5, "no port"))[1].action == "restart"
