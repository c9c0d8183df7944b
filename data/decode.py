#!/usr/bin/env python3
"""Token ids, or a token file -> text.

  ./train ... --sample 200 | data/decode.py --tokenizer tokenizer.json    its samples as text, the other lines as they are
  echo 464 3290 | data/decode.py --tiktoken gpt2                          ids with blanks or commas between them
  data/decode.py data/web.bin --tokenizer tokenizer.json                  a token file; --tokens N: its beginning

Without --tokenizer or --tiktoken a token is a byte. A token file names the tokenizer that made it, and another one is
refused. A document ends with a line end.
"""

import argparse
import array
import os
import re
import signal
import sys

from prepare import ARRAY, HEADER, MAGIC, NONE, Wrong, add_tokenizers, recorded, tokenizer_of

SAMPLE = re.compile(r"(sample after step \d+: )?(\d+(?:[ ,]+\d+)*)\s*$")
BLOCK = 1 << 20  # tokens at once


def decode_lines(lines, tokenizer, out):
    for number, line in enumerate(lines, 1):
        match = SAMPLE.match(line)
        if not match:
            out.write(line.encode(errors="surrogateescape"))
        else:
            # Beyond that no token is, and int() takes no number of any length.
            tokens = [int(t.lstrip("0")[:20] or "0") for t in re.split("[ ,]+", match[2])]
            require(tokens, tokenizer, f"line {number}")
            out.write((match[1] or "").encode() + text_of(tokens, tokenizer, tokenizer.end) + b"\n")
        out.flush()


def require(tokens, tokenizer, where):
    bad = [t for t in tokens if t >= tokenizer.vocab]
    if bad:
        raise Wrong(f"{where}: {bad[0]} is not a token of {tokenizer.name}, which has {tokenizer.vocab}")


def text_of(tokens, tokenizer, end):
    """Document by document: the token that ends one is no text."""
    parts, document = [], []
    for t in tokens:
        if t == end:
            parts += [tokenizer.decode(document), b"\n"]
            document = []
        else:
            document.append(t)
    return b"".join(parts + [tokenizer.decode(document)])


def decode_file(f, path, tokenizer, most, out):
    """Document by document, because a character, or a blank, may take several tokens."""
    header = f.read(HEADER.size)
    if len(header) < HEADER.size:
        raise Wrong(f"{path}: truncated: it ends inside its header")
    _, width, vocab, count, _, end, _, name = HEADER.unpack(header)
    name = name.rstrip(b"\0").decode(errors="backslashreplace")
    if name != recorded(tokenizer.name):
        raise Wrong(f"{path}: made with {name}, not with {tokenizer.name}; name it by --tokenizer or --tiktoken")
    if width not in ARRAY or os.fstat(f.fileno()).st_size != HEADER.size + width * count:
        raise Wrong(f"{path}: its header and its length do not fit together")
    document = []
    for at in range(0, min(count, most), BLOCK):
        tokens = array.array(ARRAY[width])
        tokens.frombytes(f.read(width * min(BLOCK, min(count, most) - at)))
        if sys.byteorder == "big":
            tokens.byteswap()
        require(tokens, tokenizer, path)
        for t in tokens:
            if t == end and end != NONE:
                out.write(tokenizer.decode(document) + b"\n")
                document = []
            else:
                document.append(t)
    out.write(tokenizer.decode(document))


def require_no_tokens(args, name):
    if args.tokens is not None:
        raise Wrong(f"--tokens {args.tokens}: {name} is text, and --tokens is for a token file; drop it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a token file or text with ids (default: what comes in)")
    add_tokenizers(parser)
    parser.add_argument("--tokens", type=int, metavar="N", help="of a token file (default: all)")
    args = parser.parse_args()
    out = sys.stdout.buffer
    try:
        if args.tokens is not None and args.tokens < 1:
            raise Wrong(f"--tokens {args.tokens}: give a number of 1 or more")
        tokenizer = tokenizer_of(args)
        if not args.file:
            require_no_tokens(args, "what comes in")
            sys.stdin.reconfigure(errors="surrogateescape", newline="\n")
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # who writes hears it too, and ends what comes in
            return decode_lines(sys.stdin, tokenizer, out)
        with open(args.file, "rb") as f:
            start = f.read(1024)
            is_tokens = start.startswith(MAGIC)
            if not is_tokens and b"\0" in start:
                raise Wrong(f"{args.file}: neither text nor a token file that names its tokenizer, as prepare.py's do")
            f.seek(0)
            if is_tokens:
                decode_file(f, args.file, tokenizer, args.tokens or 1 << 62, out)
                return out.flush()
        require_no_tokens(args, args.file)
        with open(args.file, errors="surrogateescape", newline="\n") as f:
            decode_lines(f, tokenizer, out)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Wrong, OSError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
