// The largest of errors.
#pragma once

// The larger of two, and NaN if either is: std::max(worst, NaN) is worst, and what is NaN everywhere would pass.
template <class T>
T worse(T worst, T error) {
  return worst != worst || error <= worst ? worst : error;
}
