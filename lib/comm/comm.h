// Ranks (world.h), the GPUs that they take (gpus.h), and collectives (channel.h).
#pragma once

#include "lib/comm/channel.h"
#include "lib/comm/gpus.h"
#include "lib/comm/world.h"
