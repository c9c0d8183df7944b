// What no GPU has run yet: attention's backward in one kernel, the selected branch by masked tiles, branches of NSA
// beside each other. Off until one has; `make CPPFLAGS=-DATTENTION_UNTRIED=1` builds with it.
#pragma once

#ifndef ATTENTION_UNTRIED
#define ATTENTION_UNTRIED 0
#endif
