"""Reward functions that fail in every way."""

import os
import time


def length(text):
    return float(len(text))


def odd(text):
    if text == "hang":
        time.sleep(60)
    if text == "raise":
        raise RuntimeError("broken")
    if text == "die":
        os._exit(3)
    return {"nan": float("nan"), "infinite": float("inf"), "words": "many", "none": None}.get(text, 1.0)
