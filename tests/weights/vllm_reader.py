"""Generates greedily with vLLM from a directory, for `test_vllm_reads`: prints ids and log-probabilities as JSON.

python vllm_reader.py DIRECTORY DTYPE TOKENS PROMPTS
"""

import json
import sys

import vllm


def main() -> None:
    directory, dtype, tokens, prompts = sys.argv[1:]
    llm = vllm.LLM(
        directory,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    limits = vllm.SamplingParams(temperature=0.0, max_tokens=int(tokens), ignore_eos=True, detokenize=False, logprobs=0)
    answers = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in json.loads(prompts)], limits, use_tqdm=False):
        ids, chosen = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        answers.append({"ids": ids, "log_probs": [at[i].logprob for i, at in zip(ids, chosen, strict=True)]})
    print("answers " + json.dumps(answers))


if __name__ == "__main__":
    main()
