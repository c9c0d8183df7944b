#!/bin/bash
# Text to tokens and back: data/prepare.py and data/decode.py.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

t="$dir/text.d"
mkdir "$t"
python=$(command -v python3)
to_tokens() { # OPTION...: prepare.py in $t, output in $dir/out
  (cd "$t" && timeout -k 5 $limit "$python" "$OLDPWD/data/prepare.py" "$@") >"$dir/out" 2>&1 </dev/null
  status=$?
}
# For each tokenizer: the same tokens from one process and from two, cut into files or not, and the text comes back.
round_trip() { # NAME OPTION...
  local name=$1 wrong=""
  shift
  rm -f "$t"/rt*.bin
  to_tokens a.txt b.jsonl "$@" --workers 1 --out rt.bin
  [ "$status" = 0 ] || wrong="exit status $status"
  to_tokens a.txt b.jsonl "$@" --workers 2 --out rt2.bin
  cmp -s "$t/rt.bin" "$t/rt2.bin" || wrong="$wrong; two processes write something else"
  to_tokens a.txt b.jsonl "$@" --shard-tokens 100000 --out rts.bin
  tail -q -c +257 "$t"/rts_*.bin | cmp -s - <(tail -c +257 "$t/rt.bin") || wrong="$wrong; shards hold something else"
  (cd "$t" && "$python" "$OLDPWD/data/decode.py" rt.bin "$@") >"$t/back" 2>"$dir/out"
  cmp -s "$t/back" "$t/text-of-all" || wrong="$wrong; another text comes back"
  verdict "text to tokens and back, $name" "$wrong"
}
if [ -n "$python" ]; then
  # More than a piece, with and without ends of lines, and documents; é and 東 are two and three bytes.
  { for i in $(seq 1 45000); do echo "line $i of 東京, é"; done && for i in $(seq 1 60000); do printf '%s東東東東東東東東' "$i"; done; } >"$t/a.txt"
  for i in $(seq 1 300); do echo "{\"text\": \"document $i:\\n caf\\u00e9 \\ud83d\\ude00\", \"n\": 3}"; done >"$t/b.jsonl"
  echo '{"text": ""}' >>"$t/b.jsonl"
  { cat "$t/a.txt" && echo && for i in $(seq 1 300); do printf 'document %s:\n café 😀\n' "$i"; done; } >"$t/text-of-all"
  round_trip bytes
  printf 'one<|end|>\ntwo\nlines<|end|>three' >"$t/parts.txt"
  to_tokens parts.txt --separator '<|end|>' --out parts.bin
  verdict "a separator ends documents" "$([ "$(tail -c +257 "$t/parts.bin" | tr '\0' '|')" = $'one|two\nlines|three|' ] || echo "not so: $(tail -c +257 "$t/parts.bin" | tr '\0' '|')")"
  mpi -np 2 ./train "${small[@]}" --data "$t/rts_*.bin" --eval "$t/parts.bin" --sample 5 --log "$t/bytes.jsonl"
  verdict "files of prepare.py are trained on" "$([ "$status" = 0 ] && grep -q "files, bytes of bytes)" "$dir/out" && grep -q '"bits_per_byte":[0-9]' "$t/bytes.jsonl" || echo "they are not")"
  to_tokens a.txt --out rt.bin
  judge "tokens over a file that is there" "rt.bin exists"
  printf '{"text": "a"}\n{"txt": "b"}\n' >"$t/bad.jsonl"
  to_tokens bad.jsonl --out none.bin
  judge "a JSON line without text" 'bad.jsonl:2' '"text"' "--field"
  printf '{"text": "a"}\n{"text":\n' >"$t/bad.jsonl"
  to_tokens bad.jsonl --out none.bin
  judge "a line that is no JSON" 'bad.jsonl:2' "not JSON"
  printf 'zero \0 byte' >"$t/zero.txt"
  to_tokens zero.txt --out none.bin
  judge "bytes that end documents in one" "zero.txt" "byte 5 of it is 0"
  to_tokens none.txt --out none.bin
  judge "no text file" "none.txt" "No such file"
  { printf '{"text": "a"}\n' && head -c 100000 /dev/zero | tr '\0' '[' && echo; } >"$t/deep.jsonl"
  to_tokens deep.jsonl --out none.bin
  judge "a JSON line that is nested too deeply" "deep.jsonl:2: nested too deeply"
  to_tokens a.txt --out ''
  judge "no name for tokens" "--out ''" "name of a file"
  (ulimit -f 1 && to_tokens parts.txt a.txt --out none.bin && echo $status >"$t/status")
  status=$(cat "$t/status")
  judge "a full disk" "--out: none.bin.tmp-" "File too large; make room there"
  head -c 2000 "$t/a.txt" >"$t/few.txt"
  (ulimit -f 1 && to_tokens few.txt --out none.bin && echo $status >"$t/status")
  status=$(cat "$t/status")
  judge "a disk that is full at the end" "--out: none.bin.tmp-" "File too large; make room there"
  to_tokens few.txt --shard-tokens 500 --out sh.bin
  rm "$t/sh_00000.bin"
  to_tokens few.txt --shard-tokens 5000 --out sh.bin
  judge "a shard that is left of other tokens" "sh_00001.bin exists"
  # A signal to all of its processes, as by Ctrl-C.
  mkfifo "$t/endless.txt" # so that it cannot be done before
  for signal in INT TERM; do
    { for i in $(seq 1 10); do cat "$t/a.txt"; done && exec sleep $limit; } >"$t/endless.txt" 2>/dev/null &
    feed=$!
    (cd "$t" && exec setsid "$python" -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which what runs in the background ignores
os.execv(sys.executable, [sys.executable] + sys.argv[1:])' "$OLDPWD/data/prepare.py" endless.txt --workers 2 --out none.bin) >"$dir/out" 2>&1 </dev/null &
    prepare=$!
    for ((i = 0; i < limit * 20; i++)); do [ -n "$(find "$t" -name 'none.bin.tmp-*' -size +0)" ] && break || sleep 0.05; done
    kill -$signal -- -$prepare
    wait $prepare
    status=$?
    kill $feed 2>/dev/null
    judge "a signal while text is tokenized" "ended by SIG$signal"
    verdict "and there is nothing but the line" "$([ "$(wc -l <"$dir/out")" = 1 ] || cat "$dir/out")"
  done
  verdict "what fails leaves nothing" "$(cd "$t" && find . -name 'none*')"
  "$python" data/decode.py "$t/rt.bin" --tokenizer none.json >"$dir/out" 2>&1
  status=$?
  judge "a tokenizer that is not there" "none.json"
  decode() { # OPTION...: of what comes in
    "$python" data/decode.py "$@" >"$dir/out" 2>&1
    status=$?
  }
  decode "$t/rt.bin" --tokens -3
  judge "fewer tokens than none" "--tokens -3" "1 or more"
  decode "$t/b.jsonl" --tokens 3
  judge "so many tokens of text" "--tokens 3" "b.jsonl is text"
  { head -c 40 "$t/rt.bin" && printf 'caf\351' && tail -c +45 "$t/rt.bin"; } >"$t/latin.bin"
  decode "$t/latin.bin"
  judge "a name of a tokenizer that is no UTF-8" "$t/latin.bin" 'caf\xe9'
  head -c 5000 /dev/zero | tr '\0' 7 | decode
  judge "a number of any length" "line 1: 77777777777777777777 is not a token of bytes"
  printf 'TOKENS01\0\0' >"$t/other.bin"
  decode "$t/other.bin"
  judge "tokens of nobody knows what" "$t/other.bin" "neither text nor"
  verdict "lines are as they are" "$(printf 'a\r\n104 105\nb\r\n' | "$python" data/decode.py | cmp - <(printf 'a\r\nhi\nb\r\n') 2>&1)"
else
  skip "text to tokens: there is no python3"
fi
# A tokenizer.json of bytes, two merges and a special token, whose text stands in a document too.
if "$python" -c 'import tokenizers' 2>/dev/null; then
  "$python" - "$t/tokenizer.json" <<'END'
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {c: i for i, c in enumerate(letters + ["in", "lin"])}
made = Tokenizer(models.BPE(vocab, [("i", "n"), ("l", "in")]))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.add_special_tokens(["<|endoftext|>"])
made.save(sys.argv[1])
END
  round_trip tokenizers --tokenizer tokenizer.json
  # 259 tokens: two bytes each; "lin" is one, and what looks like the special token is text.
  printf 'lin<|endoftext|>' >"$t/special.txt"
  to_tokens special.txt --tokenizer tokenizer.json --out special.bin
  verdict "a special token's text is text" "$([ "$(wc -c <"$t/special.bin")" = $((256 + 2 * (1 + 13 + 1))) ] || echo "$(wc -c <"$t/special.bin") bytes")"
  mpi -np 2 ./train "${small[@]}" --data "$t/rt.bin"
  judge "a tokenizer.json that is larger than the model" "$t/rt.bin" "259 (tokenizer.json sha256:" "--vocab 264"
  mpi -np 2 ./train "${small[@]}" --vocab 264 --data "$t/rt.bin" --sample 4 --eval "$t/special.bin" --log "$t/ids.jsonl"
  cp "$dir/out" "$t/told"
  "$python" data/decode.py --tokenizer "$t/tokenizer.json" <"$t/told" >"$dir/out" 2>&1
  verdict "samples are decoded" "$([ "$(grep -cE '^sample after step 2: ([0-9]+ ?)+' "$t/told")" = 1 ] && ! grep -qE '^sample after step 2: ([0-9]+ ?)+$' "$dir/out" && grep -q '^step  *2/2' "$dir/out" || echo "they are not")"
  to_tokens a.txt --tokenizer tokenizer.json --end-token '<none>' --out none.bin
  judge "an end token that there is not" "<none>" "--end-token"
  "$python" data/decode.py "$t/rt.bin" >"$dir/out" 2>&1
  status=$?
  judge "a token file of another tokenizer" "$t/rt.bin" "tokenizer.json sha256:" "bytes"
else
  skip "a tokenizer.json: Python's package tokenizers is not here"
fi
if "$python" -c 'import tiktoken' 2>/dev/null; then
  mkdir -p "$t/plugins/tiktoken_ext"
  cat >"$t/plugins/tiktoken_ext/small.py" <<'END'
def small():
    ranks = {bytes([i]): i for i in range(256)} | {b"li": 256, b"lin": 257}
    return {"name": "small", "pat_str": r"\S+|\s+", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 258}}


ENCODING_CONSTRUCTORS = {"small": small}
END
  export PYTHONPATH="$t/plugins${PYTHONPATH:+:$PYTHONPATH}"
  round_trip tiktoken --tiktoken small
  to_tokens a.txt --tiktoken none --out none.bin
  judge "an encoding that there is not" "--tiktoken none"
else
  skip "an encoding of tiktoken: Python's package tiktoken is not here"
fi

done_testing
