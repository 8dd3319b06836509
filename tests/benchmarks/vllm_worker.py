"""Generates with vLLM for `tests.benchmarks.engines`: reads a line of JSON for each call, and writes one of ids."""

import json
import sys

import vllm


def main() -> None:
    # Enough rows and tokens of cache for all requests at once, as vLLM has by default.
    llm = vllm.LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=1024, disable_log_stats=True)
    print("ready", flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        limits = [
            vllm.SamplingParams(
                max_tokens=limit, temperature=call["temperature"], ignore_eos=True, detokenize=False, logprobs=0
            )
            for limit in call["limits"]
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in call["prompts"]], limits, use_tqdm=False)
        print("ids " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
