from slipstream.generators.environments.adapters.opening import episode_seed, opening
from slipstream.wire.messages.trajectory import ChatMessage, Prompt


def test_an_observation_stands_below_what_the_prompt_asks():
    turns = (ChatMessage("system", "be"), ChatMessage("user", "play"))
    assert opening(Prompt(prompt=turns), "board") == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "play\n\nboard"},
    ]
    assert opening(Prompt(prompt="play"), "board") == [{"role": "user", "content": "play\n\nboard"}]
    assert opening(Prompt(prompt=""), "board") == [{"role": "user", "content": "board"}]


def test_an_observation_after_the_last_word_of_another_is_a_message_of_its_own():
    turns = (ChatMessage("system", "be"),)
    assert [one["role"] for one in opening(Prompt(prompt=turns), "board")] == ["system", "user"]


def test_the_seed_is_the_prompts_or_follows_from_its_content():
    assert episode_seed(Prompt(prompt="x", extra_info={"seed": 7})) == 7
    seeds = [episode_seed(Prompt(prompt="x", row=row)) for row in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= seed < 2**32 for seed in seeds)
