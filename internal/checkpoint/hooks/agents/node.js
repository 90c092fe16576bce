// Makes a restored Node process draw random numbers of its own. Loaded before the
// application in every process and worker of the container.
//
// It waits at Dewpoint's bell. When the container's generation has changed, the
// process is a clone: it reseeds OpenSSL, empties what node:crypto has drawn ahead,
// puts a fresh generator behind Math.random, emits "dewpoint:restored" on process,
// and reports.
'use strict';

const fs = require('fs');
const state = process.env.DEWPOINT_STATE;

if (state && fs.existsSync(state + '/bell')) {
  try {
    begin();
  } catch (e) { // the application is to start whatever is wrong here
    process.emitWarning(`dewpoint: no agent: ${e}`);
  }
}

function begin() {
  const crypto = require('crypto');
  const name = nameOf(require('worker_threads').threadId);
  const random = replaceMathRandom(crypto);
  let seen = generation();

  function check() {
    const now = generation();
    if (now === seen) return;
    seen = now;
    report(name, now, reseed(crypto, random));
  }
  report(name, seen, 'ok');
  process.on('exit', () => leave(name));
  process.on('worker', (worker) => { // one that is terminated cannot take its leave
    const itsName = nameOf(worker.threadId);
    worker.once('exit', () => leave(itsName));
  });
  listen(check);
}

function nameOf(threadId) {
  return `${state}/agents/node-${process.pid}-${threadId}`;
}

function generation() {
  return fs.readFileSync(state + '/generation', 'latin1').trim();
}

function report(name, now, result) {
  fs.writeFileSync(name + '.tmp', `${now} ${result.slice(0, 500)}\n`);
  fs.renameSync(name + '.tmp', name);
}

function leave(name) {
  try {
    fs.unlinkSync(name);
  } catch (e) {
    // it was never there, or the directory has gone
  }
}

// listen calls check whenever the bell, a FIFO, was rung: its writer came and went.
// It keeps no process alive.
function listen(check) {
  const fd = fs.openSync(state + '/bell', fs.constants.O_RDONLY | fs.constants.O_NONBLOCK);
  const bell = new (require('net').Socket)({ fd, readable: true, writable: false });
  bell.on('error', () => {});
  bell.on('close', () => {
    try {
      listen(check);
      check();
    } catch (e) {
      process.emitWarning(`dewpoint: the agent ends: ${e}`);
    }
  });
  bell.resume();
  bell.unref();
}

function reseed(crypto, random) {
  const wrong = [];
  for (const step of [reseedOpenSSL, () => drain(crypto), random.reseed, () => process.emit('dewpoint:restored')]) {
    try {
      step();
    } catch (e) {
      wrong.push(String(e && e.message).replace(/\s+/g, ' '));
    }
  }
  return wrong.join('; ') || 'ok';
}

// OpenSSL's generators are in the process's memory, and Node has no call that reseeds
// them. The object's only initialiser is OpenSSL's RAND_poll; Node then finds that it
// is no module of its own.
function reseedOpenSSL() {
  try {
    process.dlopen({ exports: {} }, `${__dirname}/reseed-${process.arch}.node`);
  } catch (e) {
    if (!/self-register/.test(e.message)) throw new Error(`OpenSSL is not reseeded: ${e.message}`);
  }
}

// drain uses up what is drawn ahead: 1,024 numbers for randomInt, 128 identifiers for
// randomUUID, of which twice as many are taken.
function drain(crypto) {
  for (let i = 0; i < 1024; i++) crypto.randomInt(2);
  if (crypto.randomUUID) for (let i = 0; i < 256; i++) crypto.randomUUID();
}

// replaceMathRandom puts sfc32 in the place of V8's generator, which cannot be
// reseeded, with a seed from the kernel. It does so at once, not after the first
// restore: a worker may have been saved after V8 had seeded it, before this ran.
function replaceMathRandom(crypto) {
  let a = 0, b = 0, c = 0, d = 0;
  function next() {
    const t = (((a + b) | 0) + d) | 0;
    d = (d + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = ((c << 21) | (c >>> 11)) + t | 0;
    return t >>> 0;
  }
  Math.random = function random() {
    return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
  };
  function reseed() {
    [a, b, c, d] = new Int32Array(new Uint8Array(crypto.randomBytes(16)).buffer);
    for (let i = 0; i < 16; i++) next();
  }
  reseed();
  return { reseed };
}
