"""An environment of SkyRL with one turn, whose reward is from `winnow grade` (see reward.py)."""

from reward import compute_score
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class WinnowEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.ground_truth = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        reward = compute_score("winnow", action, self.ground_truth)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
