// Keeps editors of one document in step: what one sends over its WebSocket,
// all others receive. A plain request is answered with the number of editors.
const http = require('node:http');
const crypto = require('node:crypto');

const editors = new Set();
const magic = '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'; // RFC 6455

function frame(text) {
	const body = Buffer.from(text).subarray(0, 65535);
	const head = body.length < 126 ? Buffer.from([0x81, body.length]) : Buffer.from([0x81, 126, body.length >> 8, body.length & 255]);
	return Buffer.concat([head, body]);
}

// One short text frame of a client, unmasked; null for anything else.
function unframe(data) {
	if (data.length < 6 || data[0] !== 0x81) return null;
	const length = data[1] & 127;
	if (length > 125 || data.length < 6 + length) return null;
	const mask = data.subarray(2, 6);
	return Buffer.from(data.subarray(6, 6 + length).map((b, i) => b ^ mask[i % 4])).toString();
}

const server = http.createServer((req, res) => res.end(JSON.stringify({ editors: editors.size }) + '\n'));
server.on('upgrade', (req, socket) => {
	const accept = crypto.createHash('sha1').update(req.headers['sec-websocket-key'] + magic).digest('base64');
	socket.write('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ' + accept + '\r\n\r\n');
	editors.add(socket);
	socket.on('data', (data) => {
		const text = unframe(data);
		if (text === null) return socket.end();
		for (const other of editors) if (other !== socket) other.write(frame(text));
	});
	for (const end of ['close', 'error']) socket.on(end, () => editors.delete(socket));
});
server.listen(3000, '0.0.0.0');
