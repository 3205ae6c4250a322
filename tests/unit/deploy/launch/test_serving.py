"""What `slipstream serve` does on its own."""

from slipstream.broker.commands.log import MOST_LIVES
from slipstream.deploy.launch.serving import deploy_of


def test_a_command_that_ends_learners_ends_its_model_before_the_server():
    assert deploy_of({}).max_restarts == MOST_LIVES
    assert deploy_of({"deploy": {"max_restarts": 1}}).max_restarts == 1
