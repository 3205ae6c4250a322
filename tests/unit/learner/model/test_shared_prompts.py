import torch

from slipstream.learner.model.shared_prompts import SharedPrompts, is_worth_sharing

CPU = torch.device("cpu")


def test_tokens_that_another_sequence_computes_find_their_states_there():
    shared = SharedPrompts.of([4, 3, 5, 2], [(0, 0), (0, 0), (3, 0), (1, 1)], CPU)
    assert shared is not None
    assert shared.computed.tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11, 13]
    assert shared.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 7, 8, 4, 9]
    assert shared.cu_queries.tolist() == [0, 4, 7, 9, 10]
    assert shared.max_queries == 4
    values = torch.arange(10.0)
    assert shared.of_all(values)[shared.computed].equal(values)

    padded = shared.padded(5)
    assert padded.computed.tolist()[10:] == [14, 15, 16, 17, 18]
    assert padded.places.tolist()[14:] == [10, 11, 12, 13, 14]
    assert padded.cu_queries.tolist() == [0, 4, 7, 9, 10, 15]
    assert padded.max_queries == 5


def test_nothing_is_shared_that_saves_less_than_a_twentieth():
    assert not is_worth_sharing(0, 0)
    assert is_worth_sharing(5, 100)
    assert not is_worth_sharing(4, 100)
    assert SharedPrompts.of([50, 50], [(0, 0), (4, 0)], CPU) is None
    assert SharedPrompts.of([50, 50], [(0, 0), (5, 0)], CPU) is not None


def test_a_gradient_is_summed_over_siblings_in_float32():
    """In bfloat16 each further 1 would be rounded away: 256 + 1 is 256."""
    shared = SharedPrompts.of([2] * 300, [(0, 0), *[(1, 0)] * 299], CPU)
    assert shared is not None
    values = torch.zeros(len(shared.computed), 2, dtype=torch.bfloat16, requires_grad=True)
    shared.of_all(values).float().sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.bfloat16
    assert values.grad[0].tolist() == [300.0, 300.0]
    assert values.grad[1:].eq(1).all()
