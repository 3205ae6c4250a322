import pytest
import torch

from algos.advantages import group_relative_advantages


def test_values_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    centred = group_relative_advantages(rewards, divide_by_std=False)
    assert centred.tolist() == [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]
    # unbiased standard deviations: sqrt(1/3) and 1
    scaled = group_relative_advantages(rewards, divide_by_std=True)
    expected = [[0.8660254, -0.8660254, -0.8660254, 0.8660254], [1.5, -0.5, -0.5, -0.5]]
    torch.testing.assert_close(scaled, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_of_equal_rewards_has_no_advantage(divide_by_std: bool):
    rewards = torch.tensor([[0.75] * 4, [-2.0] * 4])
    advantages = group_relative_advantages(rewards, divide_by_std=divide_by_std)
    assert advantages.tolist() == [[0.0] * 4] * 2


def test_a_group_does_not_depend_on_its_neighbors():
    rewards = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    together = group_relative_advantages(rewards, divide_by_std=True)
    for row, alone in zip(together, rewards, strict=True):
        torch.testing.assert_close(
            row, group_relative_advantages(alone.unsqueeze(0), divide_by_std=True)[0]
        )


def test_the_scale_of_rewards_cancels_only_with_the_standard_deviation():
    rewards = torch.tensor([[1.0, 0.0, 0.0]])
    for divide_by_std, factor in ((True, 1.0), (False, 10.0)):
        small = group_relative_advantages(rewards, divide_by_std=divide_by_std)
        large = group_relative_advantages(10 * rewards, divide_by_std=divide_by_std)
        torch.testing.assert_close(large, factor * small, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (2, 1), (1, 2, 3)])
def test_a_shape_without_siblings_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"rewards must be \[groups, siblings >= 2\]"):
        group_relative_advantages(torch.zeros(shape), divide_by_std=True)
