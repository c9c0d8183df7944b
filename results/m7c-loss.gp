# gnuplot results/m7c-loss.gp    (from the project's root) draws results/m7c-loss.svg
set terminal svg size 800,420 font "Helvetica,13" background "white"
set output "results/m7c-loss.svg"
set xlabel "step"
set ylabel "loss, nats a byte"
set grid
set yrange [0.8:3.2]
fields(f, k) = "<grep '\"step\"' results/m7c-loss-".f."-2026-11-21.jsonl | grep '\"".k."\":[0-9]' | sed 's/.*\"".k."\":\\([0-9.]*\\).*\"step\":\\([0-9]*\\).*/\\2 \\1/; s/.*\"step\":\\([0-9]*\\).*\"".k."\":\\([0-9.]*\\).*/\\1 \\2/'"
plot fields("dense", "loss") with lines lc rgb "#888888" title "dense, training", \
     fields("nsa", "loss") with lines lc rgb "#1f5fbf" title "NSA, training", \
     fields("dense", "val_loss") with linespoints lc rgb "#444444" dt 2 pt 6 title "dense, validation", \
     fields("nsa", "val_loss") with linespoints lc rgb "#0a2f6f" dt 2 pt 7 title "NSA, validation"
