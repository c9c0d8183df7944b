// Ranks (world.h) and collectives (channel.h).
#pragma once

#include "lib/comm/channel.h"
#include "lib/comm/world.h"
