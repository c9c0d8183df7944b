"""The token streams of ./train, made again in numpy: the same corpora, the same order, the same rows for each rank.

  sampler = Sampler(open_corpus("", vocab=256, seq=512, seed=0), seq=512, seed=0)
  inputs, targets = sampler.sequence(n)      # sequence number n of the run

lib/program/data.cc is the original, and says what the formats and the order are; peers/torch_fsdp.py is the user.
"""

import glob
import os

import numpy as np

HEADER_BYTES = {b"TOKENS01": 24, b"TOKENS02": 256}
U64 = (1 << 64) - 1


class CorpusError(ValueError):
    pass


def mix(x):
    """The finaliser of splitmix64; x is an int or an array of uint64."""
    if isinstance(x, int):
        x = (x + 0x9E3779B97F4A7C15) & U64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
        return x ^ (x >> 31)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --------------------------------------------------------------------------------------------------------- synthetic
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
WOMEN = "Ada Clara Emmy Grace Hedy Lise Maria Rosa Sofia Vera".split()
MEN = "Alan Blaise Carl Evariste Felix Henri Isaac Leo Niels Otto".split()
THINGS = ("lamp box brush map key kettle orange umbrella penny watch ladder egg berry violin button letter").split()
COLOURS = "red green blue old yellow small heavy silver".split()
PLACES = "kitchen garden library cellar market station attic harbour".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
WEATHER = ["it rained", "the sun shone", "the wind blew", "snow fell", "fog lay on the river"]
FINDS = "found lost bought painted mended hid".split()
FEELINGS = "glad tired hungry proud surprised calm".split()


def number(n):
    return SMALL[n] if n < 20 else TENS[n // 10] + (f"-{SMALL[n % 10]}" if n % 10 else "")


def plural(noun):
    if noun[-2:] in ("ch", "sh") or noun[-1] in "xs":
        return noun + "es"
    if noun[-1] == "y" and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def article(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


class Storyteller:
    """Draws in the order of the original: every call of below() counts."""

    def __init__(self):
        self.state, self.parts, self.length = 20240229, [], 0

    def below(self, n):
        self.state += 1
        return mix(self.state - 1) % n

    def one_of(self, words):
        return words[self.below(len(words))]

    def write(self, text):
        self.parts.append(text)
        self.length += len(text)

    def say(self, sentence):
        self.write(sentence[0].upper() + sentence[1:] + " ")

    def story(self):
        woman = self.below(2)
        who = self.one_of(WOMEN if woman else MEN)
        friend = self.one_of(MEN if woman else WOMEN)
        she = "she" if woman else "he"
        thing = self.one_of(THINGS)
        the_thing = f"the {self.one_of(COLOURS)} {thing}"
        place, other = self.one_of(PLACES), self.one_of(PLACES)
        feeling, day = self.one_of(FEELINGS), self.one_of(DAYS)
        self.say(f"on {day} {self.one_of(WEATHER)}, and {who} went to the {place}.")
        self.say(f"{she} {self.one_of(FINDS)} {article(the_thing[4:])} there.")
        for _ in range(2 + self.below(5)):
            self.sentence(woman, who, friend, she, the_thing, place, other, feeling)
        self.say(f"in the evening {who} and {friend} left the {place} with {the_thing}, and {who} was {feeling}.")
        self.parts[-1] = self.parts[-1][:-1] + "\n"

    def sentence(self, woman, who, friend, she, the_thing, place, other, feeling):
        item = self.one_of(THINGS)
        x, y, few = 1 + self.below(40), 1 + self.below(40), 1 + self.below(9)
        case = self.below(8)
        if case == 0:
            self.say(f"{who} was {feeling}, because {the_thing} was {'hers' if woman else 'his'}.")
        elif case == 1:
            what = f"was {article(item)}" if few == 1 else f"were {number(few)} {plural(item)}"
            self.say(f"there {what} in the {place}.")
        elif case == 2:
            self.say(f"{number(x)} and {number(y)} make {number(x + y)}.")
        elif case == 3:
            self.write(f"{x} + {y} = {x + y}. ")
        elif case == 4:
            self.say(f'"Where is {the_thing}?" asked {friend}. "It is in the {place}," said {who}.')
        elif case == 5:
            what = article(item) if few == 1 else f"{number(few)} {plural(item)}"
            self.say(f"{friend} gave {who} {what}, and {she} thanked {'him' if woman else 'her'}.")
        elif case == 6:
            self.say(f"the {item + ' is' if few == 1 else plural(item) + ' are'} {self.one_of(COLOURS)}.")
        else:
            self.say(f"{friend} came from the {other} to see {who} and {the_thing}.")


# ----------------------------------------------------------------------------------------------------------- corpora
class Stored:
    def __init__(self, tokens, vocab, what):
        self.tokens, self.count = tokens, len(tokens)
        if self.count == 0:
            raise CorpusError(f"{what} is empty")
        most = int(tokens.max())
        if most >= vocab:
            raise CorpusError(f"{what} holds token {most}, which is not below --vocab {vocab}")

    def read(self, first, n):
        return self.tokens[first : first + n].astype(np.int64)


class Random:
    """Uniform tokens, each a hash of its place."""

    count = 1 << 40

    def __init__(self, vocab, seed):
        self.vocab, self.key = np.uint64(vocab), mix(seed)

    def read(self, first, n):
        at = np.arange(n, dtype=np.uint64) + np.uint64((self.key + first) & U64)
        return (((mix(at) >> np.uint64(32)) * self.vocab) >> np.uint64(32)).astype(np.int64)


def synthetic(seq):
    size = max(2 << 20, 40 * (seq + 1))
    teller = Storyteller()
    while teller.length < size:
        teller.story()
    return np.frombuffer("".join(teller.parts).encode()[:size], dtype=np.uint8)


def token_file(path):
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as e:
        raise CorpusError(f"data file {path} cannot be read: {e}") from e
    if raw[:8].tobytes() in HEADER_BYTES and len(raw) >= 24:
        header, width = HEADER_BYTES[raw[:8].tobytes()], int(raw[8:12].view("<u4")[0])
        count = int(raw[16:24].view("<u8")[0])
    elif len(raw) >= 1024 and int(raw[:4].view("<u4")[0]) in (20240520, 20240801):
        magic, _, count = (int(x) for x in raw[:12].view("<u4"))
        header, width = 1024, 2 if magic == 20240520 else 4
    elif path.endswith((".bin", ".tokens")):
        raise CorpusError(f"data file {path} has a wrong magic number")
    else:
        return raw  # text, a byte a token
    if width not in (1, 2, 4) or header + count * width != len(raw):
        raise CorpusError(f"data file {path}: its header and its length do not fit together")
    return raw[header:].view(f"<u{width}")


def data_files(names):
    """Names and patterns with commas between them, as lib/program/data_files.h has them."""
    if os.path.exists(names):
        return [names]
    paths = []
    for name in names.split(","):
        found = sorted(glob.glob(name), key=os.fsencode) if not os.path.exists(name) and set(name) & set("*?[") else [name]
        if not found:
            raise CorpusError(f"data files {name}: no file matches the pattern")
        paths += found
    return paths


def token_files(names):
    """Several are one that holds them all; only a single file is left on the disk."""
    parts = [token_file(path) for path in data_files(names)]
    if len({part.dtype for part in parts}) > 1:
        raise CorpusError(f"data files {names} differ in their bytes a token")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def open_corpus(path, vocab, seq, seed):
    """path: "" the synthetic corpus, "random", or files. All of it: nothing is kept for validation."""
    if path == "random":
        return Random(vocab, seed)
    tokens = token_files(path) if path else synthetic(seq)
    corpus = Stored(tokens, vocab, f"data file {path}" if path else "the built-in corpus")
    if corpus.count <= seq:
        raise CorpusError(f"data of {corpus.count} tokens is shorter than a sequence and its target, {seq + 1}")
    return corpus


# ------------------------------------------------------------------------------------------------------------- order
def permute(i, n, key):
    """Place i of a permutation of [0, n): a Feistel network that walks its cycle back into range."""
    half = 2
    while half < 31 and 1 << (2 * half) < n:
        half += 1
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for turn in range(6):
            left, right = right, left ^ (mix(key ^ mix(right * 8 + turn)) & mask)
        i = left << half | right
        if i < n:
            return i


class Sampler:
    def __init__(self, corpus, seq, seed):
        self.corpus, self.seq, self.seed = corpus, seq, seed
        self.windows = (corpus.count - 1) // seq

    def sequence(self, n):
        epoch, place = divmod(n, self.windows)
        tokens = self.corpus.read(permute(place, self.windows, mix(self.seed ^ mix(epoch))) * self.seq, self.seq + 1)
        return tokens[:-1], tokens[1:]

    def batch(self, step, rank, world, micro_batches, rows):
        """Inputs and targets (micro_batches, rows, seq) of a rank in a step, which counts from 1."""
        own = micro_batches * rows
        first = ((step - 1) * world + rank) * own
        pairs = [self.sequence(first + i) for i in range(own)]
        shape = (micro_batches, rows, self.seq)
        return tuple(np.stack([p[k] for p in pairs]).reshape(shape) for k in (0, 1))
