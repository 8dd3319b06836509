"""Environments that end in every way."""

import os
import time

from maxlib.post_training import Prompt


class Counting:
    """Asks for `turns` turns; the task says what goes wrong in the second."""

    def __init__(self, task):
        self.task, self.text, self.turn = task, [1, 2], 0

    def reset(self):
        if self.task == "late":
            time.sleep(0.2)
        return Prompt(self.text)

    def step(self, tokens):
        self.turn += 1
        if self.turn == 2:
            if self.task == "hang":
                time.sleep(60)
            if self.task == "raise":
                raise RuntimeError("broken")
            if self.task == "die":
                os._exit(3)
            if self.task == "forget":  # earlier turns look different from now on
                self.text = [9]
                return Prompt(self.text)
        self.text = [*self.text, *tokens, 20 + self.turn]
        return None if self.turn == 3 and self.task != "endless" else Prompt(self.text)

    def reward(self):
        return None if self.task == "unscored" else float(self.turn)
