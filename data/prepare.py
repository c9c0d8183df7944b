#!/usr/bin/env python3
"""Text or JSON lines -> token files for ./train.

  data/prepare.py books/*.txt --out data/books.bin                              bytes, a token each; vocabulary 256
  data/prepare.py web.jsonl --tokenizer tokenizer.json --out data/web.bin       PyPI's tokenizers
  data/prepare.py web.jsonl --tiktoken gpt2 --shard-tokens 100000000 --out data/web.bin    data/web_00000.bin, ...

A JSON line is a document (--field names its text), and so is a text file, or what stands between two --separator. Behind
each document stands the token that ends it: 0 for bytes, otherwise the tokenizer's own, or --end-token. What looks like
a special token in a document is text.

Input is read as it is needed and may be larger than memory. All cores tokenize; what is written does not depend on how
many. A text file is tokenized in pieces of about a MiB, cut at the ends of lines, and the last token of one is never
joined with the first of the next. A file appears under its name when it is complete, and none that is there is replaced.

The format: data/README.md. Back to text: data/decode.py.
"""

import argparse
import array
import collections
import concurrent.futures.process
import contextlib
import errno
import glob
import hashlib
import json
import multiprocessing
import os
import signal
import struct
import sys

MAGIC = b"TOKENS02"
HEADER = struct.Struct("<8sIIQQII216s")  # magic, width, vocabulary, tokens, bytes of text, end of document, 0, name
NONE = 0xFFFFFFFF
ARRAY = {1: "B", 2: "H", 4: "I"}  # what the array module calls tokens of so many bytes
PIECE = 1 << 20  # bytes of text that a core is given at once
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Wrong(Exception):
    """What the user can mend: a line."""


class Stopped(BaseException):
    """By a signal, its number."""


def at_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def stop(number, _frame):
    at_signals(signal.SIG_IGN)  # what was begun is removed first
    raise Stopped(number)


# -------------------------------------------------------------------------------------------------------- tokenizers
class Bytes:
    name, vocab, end = "bytes", 256, 0

    def encode(self, data, where):
        at = data.find(b"\0")
        if at >= 0:
            raise Wrong(f"{where}: byte {at} of it is 0, which ends a document here; remove it, or use a tokenizer")
        return bytes(data)

    def decode(self, tokens):
        return bytes(tokens)


class Ids:
    """Tokens of two or four bytes, by a library."""

    def encode(self, data, where):
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            raise Wrong(f"{where}: byte {e.start} of it is not valid UTF-8; convert it, or leave it as bytes") from e
        ids = array.array(ARRAY[width_of(self.vocab)], self.ids(text))
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()


class Tokenizer(Ids):
    def __init__(self, path, end_token=None):
        try:
            with open(path, "rb") as f:
                digest = hashlib.sha256(f.read()).hexdigest()
        except OSError as e:
            raise Wrong(f"--tokenizer {path}: {e}") from e
        tokenizers = library("tokenizers")
        try:
            self.model = tokenizers.Tokenizer.from_file(path)
        except Exception as e:  # the library raises nothing narrower
            raise Wrong(f"--tokenizer {path}: {e}") from e
        self.model.encode_special_tokens = True
        self.model.no_truncation()
        self.model.no_padding()
        ids = self.model.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values()) + 1
        self.name = f"{os.path.basename(path)} sha256:{digest[:16]}"
        known = [end_token] if end_token else [t for t in END_TOKENS if t in ids]
        if not known or known[0] not in ids:
            asked = f"has no token {end_token!r}" if end_token else f"has none of {', '.join(END_TOKENS)}"
            raise Wrong(f"--tokenizer {path} {asked} to end a document with; name one of its tokens by --end-token")
        self.end = ids[known[0]]

    def ids(self, text):
        return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, tokens):
        return self.model.decode(list(tokens), skip_special_tokens=False).encode()


class Tiktoken(Ids):
    def __init__(self, name, end_token=None):
        tiktoken = library("tiktoken")
        try:
            self.model = tiktoken.get_encoding(name)
            self.end = self.model.encode_single_token(end_token) if end_token else self.model.eot_token
        except Exception as e:  # unknown names, tokens, and all that the network can do
            raise Wrong(f"--tiktoken {name}: {type(e).__name__}: {e}") from e
        self.vocab, self.name = self.model.n_vocab, f"tiktoken {name}"

    def ids(self, text):
        return self.model.encode_ordinary(text)

    def decode(self, tokens):
        return self.model.decode_bytes(list(tokens))


def library(name):
    try:
        return __import__(name)
    except ImportError as e:
        raise Wrong(f"Python's package {name} is not here: pip install {name}") from e


def add_tokenizers(parser):
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, as PyPI's tokenizers reads it")
    which.add_argument("--tiktoken", metavar="NAME", help="an encoding of tiktoken, such as gpt2 or o200k_base")
    parser.add_argument("--end-token", metavar="TOKEN", help="that ends a document (default: the tokenizer's own)")


def tokenizer_of(args):
    if args.tokenizer:
        return Tokenizer(args.tokenizer, args.end_token)
    if args.tiktoken:
        return Tiktoken(args.tiktoken, args.end_token)
    if args.end_token:
        raise Wrong("--end-token needs --tokenizer or --tiktoken; a document of bytes ends with 0")
    return Bytes()


def recorded(name):
    """A tokenizer's name as a file's header has room for it."""
    return "".join(c if " " <= c <= "~" else "?" for c in name)[:215]


def width_of(vocab):
    return 1 if vocab <= 256 else 2 if vocab <= 65536 else 4


# ------------------------------------------------------------------------------------------------------------- input
# A piece is (kind, data, where, ends): kind "text" or "json", where in words, whether a document ends with it.


def text_pieces(path, separator):
    """A text file in pieces, in constant memory. A line end right behind a separator belongs to it."""
    cut = os.fsencode(separator) if separator else b""
    with open(path, "rb") as f:
        rest, offset = b"", 0
        begun = False  # a document of which a piece has gone before
        behind_cut = False
        while True:
            block = f.read(PIECE)
            rest += block
            *documents, rest = rest.split(cut) if cut else [rest]
            for document in documents:
                text = document[1:] if behind_cut and document.startswith(b"\n") else document
                if begun or text:
                    yield "text", text, f"{path} from byte {offset + len(document) - len(text)}", True
                begun, behind_cut, offset = False, True, offset + len(document) + len(cut)
            if behind_cut and rest:
                skipped = rest.startswith(b"\n")
                behind_cut, offset, rest = False, offset + skipped, rest[skipped:]
            if not block:
                break
            if len(rest) < PIECE:
                continue
            at = end_of_piece(rest, len(rest) - max(len(cut), 4))  # a separator may have begun at the very end
            yield "text", rest[:at], f"{path} from byte {offset}", False
            begun, offset, rest = True, offset + at, rest[at:]
        if begun or rest:
            yield "text", rest, f"{path} from byte {offset}", True


def end_of_piece(data, limit):
    """Behind the last line that ends before the limit; in a line without an end, in front of a character."""
    at = data.rfind(b"\n", 0, limit) + 1
    if at > 0:
        return at
    at = limit
    while at > limit - 3 and (data[at] & 0xC0) == 0x80:
        at -= 1
    return at


def json_pieces(path):
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                yield "json", line, f"{path}:{number}", True


def pieces(paths, form, separator):
    for path in paths:
        is_json = form == "jsonl" or (form == "auto" and path.endswith((".jsonl", ".ndjson", ".json")))
        try:
            yield from json_pieces(path) if is_json else text_pieces(path, separator)
        except OSError as e:
            raise Wrong(f"{path}: {e.strerror}") from e


def batches(all_pieces):
    """Small documents together, so that a core has something to do."""
    batch, size = [], 0
    for piece in all_pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------------------- cores
worker = None  # a core's tokenizer and the field of a JSON line


def start_worker(args):
    global worker
    worker = (tokenizer_of(args), args.field)


def document_of(line, where, field):
    try:
        value = json.loads(line)
    except ValueError as e:
        raise Wrong(f"{where}: not JSON: {e}") from e
    except RecursionError as e:
        raise Wrong(f"{where}: nested too deeply to be read; remove the line") from e
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise Wrong(f'{where}: no text in the field "{field}"; --field names another')
    try:
        return value[field].encode()
    except UnicodeEncodeError as e:
        raise Wrong(f"{where}: half of a surrogate pair at character {e.start}, which is no text") from e


def tokenize(batch):
    """(tokens, bytes of text, documents) or what is wrong."""
    tokenizer, field = worker
    width = width_of(tokenizer.vocab)
    end = tokenizer.end.to_bytes(width, "little")
    out, text_bytes, documents = [], 0, 0
    try:
        for kind, data, where, ends in batch:
            if kind == "json":
                data = document_of(data, where, field)
                if not data:
                    continue
            out.append(tokenizer.encode(data, where))
            text_bytes += len(data)
            if ends:
                out.append(end)
                documents += 1
    except Wrong as e:
        return str(e)
    return b"".join(out), text_bytes, documents


def submit(pool, batch):
    """A process that starts for it inherits that it does not hear Ctrl-C, which the parent does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(tokenize, batch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tokenized(args, all_batches):
    """The batches' results in order. No more than a few batches for each core are on their way."""
    if args.workers == 1:
        start_worker(args)
        yield from map(tokenize, all_batches)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(args.workers, context, start_worker, (args,))
    waiting = collections.deque()
    try:
        for batch in all_batches:
            waiting.append(submit(pool, batch))
            if len(waiting) >= 3 * args.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as e:
        raise Wrong("a process that tokenizes was killed; if memory was short, use fewer --workers") from e
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------------------ output
class Output:
    """Files of at most so many tokens each, which get their names together, at the end."""

    def __init__(self, path, tokenizer, shard_tokens):
        if not os.path.basename(path):
            raise Wrong(f"--out {path or repr(path)}: give the name of a file")
        self.path, self.tokenizer, self.shard_tokens = path, tokenizer, shard_tokens
        self.width = width_of(tokenizer.vocab)
        self.file, self.made, self.tokens, self.text = None, [], 0, 0
        self.require_free(self.name(0))
        if shard_tokens:  # readers take all of the name: one that is left of more would join in
            stem, ending = (glob.escape(part) for part in os.path.splitext(path))
            for other in sorted(glob.glob(f"{stem}_[0-9][0-9][0-9][0-9][0-9]*{ending or '.bin'}")):
                self.require_free(other)

    def name(self, number):
        if not self.shard_tokens:
            return self.path
        stem, ending = os.path.splitext(self.path)
        return f"{stem}_{number:05}{ending or '.bin'}"

    def require_free(self, path):
        if os.path.lexists(path):
            raise Wrong(f"--out: {path} exists and is not replaced; remove it or choose another name")

    def add(self, data, text_bytes):
        """text_bytes are counted for the file in which the piece begins, and shared out where it goes on in others."""
        total, at = len(data), 0
        while at < total:
            if self.file is None:
                self.begin()
            room = (self.shard_tokens - self.tokens) * self.width if self.shard_tokens else total
            part = data[at : at + room]
            before = text_bytes * at // total
            at += len(part)
            with self.writing():
                self.file.write(part)
            self.tokens += len(part) // self.width
            self.text += text_bytes * at // total - before
            if self.tokens == self.shard_tokens:
                self.end()

    def begin(self):
        path = self.name(len(self.made))
        self.require_free(path)
        self.made.append((f"{path}.tmp-{os.getpid()}", path))
        with self.writing():
            self.file = open(self.made[-1][0], "xb")
            self.file.write(bytes(HEADER.size))
        self.tokens = self.text = 0

    def end(self):
        t = self.tokenizer
        name = recorded(t.name).encode()
        with self.writing():
            self.file.seek(0)
            self.file.write(HEADER.pack(MAGIC, self.width, t.vocab, self.tokens, self.text, t.end, 0, name))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        self.file = None

    @contextlib.contextmanager
    def writing(self):
        try:
            yield
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            what_to_do = "make room there, or choose another place" if full else "choose another place"
            raise Wrong(f"--out: {self.made[-1][0]}: {e.strerror}; {what_to_do}") from e

    def finish(self):
        if self.file:
            self.end()
        for _, path in self.made:
            self.require_free(path)
        at_signals(signal.SIG_IGN)  # all files get their names, or none
        while self.made:
            os.rename(*self.made[0])
            del self.made[0]

    def discard(self):
        if self.file:
            with contextlib.suppress(OSError):  # of what could not be written
                self.file.close()
        for temporary, _ in self.made:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def prepare(args):
    tokenizer = tokenizer_of(args)
    if args.shard_tokens < 0 or args.workers < 1:
        raise Wrong("--shard-tokens is 0 or more, and --workers 1 or more")
    if args.separator is not None and not 0 < len(args.separator) <= 1000:
        raise Wrong("--separator has from 1 to 1000 characters")
    output = Output(args.out, tokenizer, args.shard_tokens)
    tokens = text_bytes = documents = 0
    try:
        for result in tokenized(args, batches(pieces(args.files, args.format, args.separator))):
            if isinstance(result, str):
                raise Wrong(result)
            data, some_bytes, some_documents = result
            output.add(data, some_bytes)
            tokens += len(data) // output.width
            text_bytes, documents = text_bytes + some_bytes, documents + some_documents
        if tokens == 0:
            raise Wrong(f"{', '.join(args.files)}: no text in it")
        files = len(output.made)
        output.finish()
    except BaseException:
        output.discard()
        raise
    vocab = (tokenizer.vocab + 7) // 8 * 8
    print(
        f"{args.out}: {tokens:,} tokens of {output.width} bytes in {files} file{'s' * (files > 1)}; {documents:,} "
        f"documents, {text_bytes:,} bytes of text; {tokenizer.name}: train with --vocab {vocab} or more"
    )


def main():
    doc = __doc__.split("\n", 1)
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc[0], epilog=doc[1], formatter_class=layout)
    parser.add_argument("files", nargs="+", metavar="FILE", help="text, or JSON lines (.jsonl, .ndjson, .json)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the token file, or what shards are called after")
    add_tokenizers(parser)
    forms = ("auto", "text", "jsonl")
    parser.add_argument("--format", choices=forms, default="auto", help="of the files (default: by their names)")
    parser.add_argument("--field", default="text", help="of a JSON line that holds the text (default: text)")
    parser.add_argument("--separator", metavar="TEXT", help="that stands between documents in a text file")
    parser.add_argument("--shard-tokens", type=int, default=0, metavar="N", help="a file (default: all in one file)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(default: all cores)")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores have a process each
    # Python's tracker cleans up behind a pool that a signal ended, and would warn of it.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"
    at_signals(stop)
    try:
        prepare(args)
    except (Wrong, OSError) as e:
        sys.exit(f"error: {e}")
    except Stopped as e:
        print(f"error: ended by {signal.Signals(e.args[0]).name}; nothing is written", file=sys.stderr, flush=True)
        # The pool would wait for processes that the same signal may have killed in the middle of an answer.
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(128 + e.args[0])


if __name__ == "__main__":
    main()
