"""The high-level examples of llama-cpp-python, with the import changed.

python examples/llama.py -m model.gguf            # a completion, as JSON
python examples/llama.py -m model.gguf --stream   # its chunks
python examples/llama.py -m model.gguf --chat     # an answer to a message
python examples/llama.py -m model.gguf --embed    # hidden states
python examples/llama.py -m model.gguf --infill "def add(" "    return sum"
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from pykvgraph import KVGraphError, Llama

PROMPT = "Question: What are the names of the planets in the solar system? Answer: "


def main() -> None:
    parser = argparse.ArgumentParser(description="llama-cpp-python's high-level examples on pykvgraph.")
    parser.add_argument("-m", "--model", required=True, help="a GGUF file")
    parser.add_argument("-p", "--prompt", default=PROMPT, help="what to continue, or to answer")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--stream", action="store_true", help="print chunks as they come")
    way.add_argument("--chat", action="store_true", help="answer the prompt as a message")
    way.add_argument("--embed", action="store_true", help="print the prompt's embedding")
    way.add_argument("--infill", nargs=2, metavar=("PREFIX", "SUFFIX"), help="fill in what comes between")
    args = parser.parse_args()

    llm = Llama(model_path=args.model, embedding=args.embed)
    if args.stream:
        for chunk in llm(args.prompt, max_tokens=48, stop=["Q:", "\n"], stream=True):
            print(json.dumps(chunk))
    elif args.chat:
        messages = [{"role": "user", "content": args.prompt}]
        print(json.dumps(llm.create_chat_completion(messages, max_tokens=48), indent=2))
    elif args.embed:
        print(json.dumps(llm.create_embedding(args.prompt)))
    elif args.infill:
        prefix, suffix = args.infill
        answer = llm.create_completion(prefix, suffix=suffix, temperature=0.0)
        print(prefix + answer["choices"][0]["text"] + suffix)
    else:
        output = llm(args.prompt, max_tokens=48, stop=["Q:", "\n"], echo=True)
        print(json.dumps(output, indent=2))


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KVGraphError, OSError) as error:
        sys.exit(f"llama.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
