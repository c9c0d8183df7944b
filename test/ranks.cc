// build/test_ranks: ranks under mpirun. See test/main.cc.
extern const bool under_mpi = true;
