package redis

import "github.com/redis/go-redis/v9"

// The keys, with the PoP's id as P, under the prefix "dewpoint:{P}:":
//
//	epoch          hash: id, run (the server's run id), born (by the clock below)
//	clock          hash: now, last (both in microseconds)
//	token          the greatest token given
//	lease:KEY      hash: token, owner, node, seq, until
//	leases         sorted set: keys that have a lease, by when it expires
//	nodes          sorted set: sessions, by when they expire
//	node:SESSION   hash: node, seq, member (JSON)
//	refs:SESSION   set: what the session's node uses
//	uses           stream: touches
//	policy         hash: token, position, data
//	events         the channel of events

// Every script begins so. KEYS[1] is the epoch's key, which names the server in
// a cluster; all others have the same hash tag. ARGV: prefix, the lease period in microseconds,
// the epoch, and from the fourth on the script's own. Numbers are doubles, exact until 2^53.
const preamble = `
local P, TTL, EPOCH = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local function text(n) return string.format('%.0f', n) end
local function micros()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
local function clock()
  local t = micros()
  local c = redis.call('HMGET', P..'clock', 'now', 'last')
  local step = t - (tonumber(c[2]) or t)
  local now = (tonumber(c[1]) or 0) + math.max(0, math.min(step, math.floor(TTL / 5)))
  redis.call('HSET', P..'clock', 'now', text(now), 'last', text(t))
  return now
end
local function greatest() return tonumber(redis.call('GET', P..'token') or '0') end
local function member(session, node)
  return redis.call('HGET', P..'node:'..session, 'member') or cjson.encode({node=node})
end
-- the lease of key, or nil if it has expired
local function lease(key, now)
  local l = redis.call('HMGET', P..'lease:'..key, 'token', 'owner', 'node', 'seq', 'until')
  if not l[1] or tonumber(l[5]) <= now then return nil end
  return {token=l[1], owner=l[2], node=l[3], seq=tonumber(l[4])}
end
local function grant(key, token, session, node, seq, now)
  redis.call('HSET', P..'lease:'..key, 'token', token, 'owner', session, 'node', node, 'seq', seq, 'until', text(now + TTL))
  redis.call('ZADD', P..'leases', text(now + TTL), key)
end
`

const inEpoch = `
if redis.call('HGET', KEYS[1], 'id') ~= EPOCH then return redis.error_reply('EPOCH') end
`

func script(body string) *redis.Script { return redis.NewScript(preamble + inEpoch + body) }

// ARGV[3]: the id if an epoch begins. [4]: the floor. Leases and references of
// before the restart are kept: they expire, or their holders say otherwise.
var beginScript = redis.NewScript(preamble + `
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local e = redis.call('HMGET', KEYS[1], 'id', 'run')
if e[1] and e[2] == run then return e[1] end
local now, floor, time = clock(), tonumber(ARGV[4]), micros()
if time > 2^52 then time = 0 end
local start = math.max(greatest(), floor, time)
if start > time then start = start + 1000000000 end
redis.call('SET', P..'token', text(start))
redis.call('HSET', KEYS[1], 'id', EPOCH, 'run', run, 'born', text(now))
return EPOCH
`)

// ARGV[4]: session, node, seq, member or ”, full, then three lists that begin with their
// length: key, token and restore of each lease; use; drop.
var beatScript = script(`
local session, node, seq, announced, full = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8] == '1'
local at = 9
local function list()
  local l, n = {}, tonumber(ARGV[at])
  for i = 1, n do l[i] = ARGV[at + i] end
  at = at + n + 1
  return l
end
local leases, use, drop = list(), list(), list()
local now = clock()
local until_ = tonumber(redis.call('ZSCORE', P..'nodes', session) or '0')
if until_ <= now and not full then return redis.error_reply('UNKNOWN') end
if tonumber(redis.call('HGET', P..'node:'..session, 'seq') or '0') >= seq then return redis.error_reply('LATE') end
redis.call('HSET', P..'node:'..session, 'node', node, 'seq', text(seq))
if announced ~= '' then redis.call('HSET', P..'node:'..session, 'member', announced) end
redis.call('ZADD', P..'nodes', text(now + TTL), session)
local refs = P..'refs:'..session
if full then redis.call('DEL', refs) end
for _, key in ipairs(use) do redis.call('SADD', refs, key) end
for _, key in ipairs(drop) do redis.call('SREM', refs, key) end
local top, lost = greatest(), {}
for i = 1, #leases, 3 do
  local key, token, restore = leases[i], leases[i + 1], leases[i + 2] == '1'
  local l = lease(key, now)
  if l and l.token == token or restore and (not l or tonumber(l.token) < tonumber(token)) then
    grant(key, token, session, node, l and l.token == token and text(l.seq) or text(seq), now)
    if tonumber(token) > top then
      top = tonumber(token)
      redis.call('SET', P..'token', token)
    end
  else
    lost[#lost + 1] = key
  end
end
for _, s in ipairs(redis.call('ZRANGEBYSCORE', P..'nodes', '-inf', text(now), 'LIMIT', 0, 100)) do
  redis.call('DEL', P..'node:'..s, P..'refs:'..s)
  redis.call('ZREM', P..'nodes', s)
end
for _, key in ipairs(redis.call('ZRANGEBYSCORE', P..'leases', '-inf', text(now), 'LIMIT', 0, 100)) do
  redis.call('DEL', P..'lease:'..key)
  redis.call('ZREM', P..'leases', key)
end
return {text(top), lost}
`)

// ARGV[4]: session, node, seq, key, above.
var acquireScript = script(`
local session, node, seq, key, above = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local now = clock()
local l = lease(key, now)
if l and (l.node ~= node or l.owner == session and l.seq >= seq) then
  return {'0', l.token, member(l.owner, l.node)}
end
local token = math.max(greatest(), above) + 1
if token >= 2^53 then return redis.error_reply('TOKENS are used up') end
redis.call('SET', P..'token', text(token))
grant(key, text(token), session, node, text(seq), now)
return {text(token)}
`)

// ARGV[4]: key, token.
var releaseScript = script(`
if redis.call('HGET', P..'lease:'..ARGV[4], 'token') == ARGV[5] then
  redis.call('DEL', P..'lease:'..ARGV[4])
  redis.call('ZREM', P..'leases', ARGV[4])
end
return 0
`)

// ARGV[4]: key.
var holderScript = script(`
local l = lease(ARGV[4], clock())
if not l then return {} end
return {l.token, member(l.owner, l.node)}
`)

// ARGV[4...]: keys. Returns key, node, key, node...
var usersScript = script(`
local users = {}
for _, session in ipairs(redis.call('ZRANGEBYSCORE', P..'nodes', '('..text(clock()), '+inf')) do
  local node = redis.call('HGET', P..'node:'..session, 'node')
  for i = 4, #ARGV do
    if redis.call('SISMEMBER', P..'refs:'..session, ARGV[i]) == 1 then
      users[#users + 1] = ARGV[i]
      users[#users + 1] = node
    end
  end
end
return users
`)

// Members, those heard of last at the end.
var membersScript = script(`
local all = {}
for _, session in ipairs(redis.call('ZRANGEBYSCORE', P..'nodes', '('..text(clock()), '+inf')) do
  local m = redis.call('HGET', P..'node:'..session, 'member')
  if m then all[#all + 1] = m end
end
return all
`)

var settledScript = script(`
return clock() - tonumber(redis.call('HGET', KEYS[1], 'born')) >= TTL and 1 or 0
`)

// ARGV[4...]: touches.
var touchScript = script(`
for i = 4, #ARGV do redis.call('XADD', P..'uses', 'MAXLEN', '~', 65536, '*', 't', ARGV[i]) end
return 0
`)

// ARGV[4]: id or ”, [5]: limit. Returns id, touch, id, touch...
var touchesScript = script(`
local out = {}
local from = ARGV[4] == '' and '-' or '('..ARGV[4]
for _, e in ipairs(redis.call('XRANGE', P..'uses', from, '+', 'COUNT', ARGV[5])) do
  out[#out + 1] = e[1]
  out[#out + 1] = e[2][2]
end
return out
`)

// ARGV[4]: token, position, data, id until which touches are not needed or ”.
var savePolicyScript = script(`
local there = redis.call('HGET', P..'policy', 'token')
if there and tonumber(there) > tonumber(ARGV[4]) then return redis.error_reply('FENCED') end
redis.call('HSET', P..'policy', 'token', ARGV[4], 'position', ARGV[5], 'data', ARGV[6])
if ARGV[7] ~= '' then redis.call('XTRIM', P..'uses', 'MINID', ARGV[7]) end
return 0
`)

var loadPolicyScript = script(`
local p = redis.call('HMGET', P..'policy', 'token', 'position', 'data')
if not p[1] then return {} end
return p
`)
