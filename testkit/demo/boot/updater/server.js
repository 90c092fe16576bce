// Holds documents: replays the journal when it starts, then serves each text.
const fs = require('node:fs');
const http = require('node:http');

const docs = new Map();
for (const { doc, at, insert } of JSON.parse(fs.readFileSync('/srv/journal.json', 'utf8'))) {
	const text = docs.get(doc) ?? '';
	const where = at % (text.length + 1);
	docs.set(doc, text.slice(0, where) + insert + text.slice(where));
}
http.createServer((req, res) => {
	const text = docs.get(Number(req.url.slice(1) || 0));
	res.statusCode = text === undefined ? 404 : 200;
	res.end(text);
}).listen(3000, '0.0.0.0');
