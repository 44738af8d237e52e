"""Simulated attacks: which devices attack, and their batches and updates."""

import numpy as np
import torch

from freshet.training.outgoing import AttackOptions, add_trigger, choose_attackers, flip_update, poison_batch


def test_the_seed_decides_which_devices_attack() -> None:
    options = AttackOptions(kind="sign-flip", share=0.2)
    chosen = choose_attackers(options, 3, 50)
    assert len(chosen) == 10 and chosen == choose_attackers(options, 3, 50) and chosen <= set(range(50))
    assert chosen != choose_attackers(options, 4, 50)
    assert choose_attackers(AttackOptions(), 3, 50) == frozenset()
    assert len(choose_attackers(options, 0, 2)) == 1


def test_sign_flip_reverses_and_enlarges_the_learnable_part() -> None:
    base, weights = np.array([1.0, 2.0, 7.0], np.float32), np.array([1.5, 1.0, 9.0], np.float32)
    out = flip_update(AttackOptions(kind="sign-flip", strength=10.0), weights, base, 2)
    assert out.tolist() == [1 - 10 * 0.5, 2 + 10 * 1.0, 9.0]
    assert weights.tolist() == [1.5, 1.0, 9.0]


def test_label_flip_mirrors_the_classes() -> None:
    x, y = torch.rand(4, 3), torch.tensor([0, 1, 8, 9])
    same, flipped = poison_batch(AttackOptions(kind="label-flip"), x, y, 10)
    assert same is x and flipped.tolist() == [9, 8, 1, 0]


def test_backdoor_adds_the_trigger_and_the_target_to_every_second_sample() -> None:
    x, y = torch.rand(5, 1, 8, 8), torch.arange(5)
    x[0, 0, 0, 0] = 3.0
    before = x.clone()
    marked_x, claimed = poison_batch(AttackOptions(kind="backdoor", target=7), x.clone(), y.clone(), 10)
    assert claimed.tolist() == [7, 1, 7, 3, 7]
    assert torch.equal(marked_x[1::2], before[1::2])
    assert (marked_x[::2, :, -3:, -3:] == marked_x[::2].amax()).all()
    assert torch.equal(marked_x[::2, :, :-3], before[::2, :, :-3])


def test_the_trigger_on_inputs_other_than_images() -> None:
    x = torch.rand(2, 10)
    assert (add_trigger(x)[:, -3:] == x.amax()).all() and torch.equal(add_trigger(x)[:, :-3], x[:, :-3])
