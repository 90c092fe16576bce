// Answers each connection with what its generators give next, and a worker's.
'use strict';
const { randomBytes, randomInt, randomUUID, generateKeyPairSync } = require('crypto');
const { Worker, isMainThread, parentPort } = require('worker_threads');

function draw(prefix, bytes) {
  const key = generateKeyPairSync('ec', { namedCurve: 'P-256' }).publicKey;
  const drawn = {
    math: Math.random(), uuid: randomUUID(), webuuid: crypto.randomUUID(), int: randomInt(2 ** 40),
    bytes: randomBytes(8).toString('hex'), key: key.export({ type: 'spki', format: 'der' }).toString('hex').slice(-32),
    web: Buffer.from(crypto.getRandomValues(new Uint8Array(8))).toString('hex'), pool: bytes.toString('hex'),
  };
  return Object.entries(drawn).map(([k, v]) => `${prefix}${k}=${v}`).join(' ');
}

if (isMainThread) {
  const worker = new Worker(__filename);
  const ended = new Worker('setInterval(() => {}, 1000)', { eval: true });
  setTimeout(() => ended.terminate(), 50);
  draw('', randomBytes(8));
  const server = require('net').createServer((c) => {
    c.on('error', () => {});
    randomBytes(8, (_, bytes) => {
      worker.once('message', (theirs) => c.end(`${draw('', bytes)} ${theirs}`));
      worker.postMessage('draw');
    });
  });
  ended.on('exit', () => server.listen(Number(process.argv[2]), '127.0.0.1'));
} else {
  draw('', Buffer.alloc(0));
  parentPort.on('message', () => parentPort.postMessage(draw('worker-', randomBytes(8))));
}
