// Writes a journal of changes to 200 documents, the same each time.
let state = 1;
const next = (n) => (state = (state * 48271) % 2147483647) % n;
const changes = [];
for (let i = 0; i < 40000; i++) {
	changes.push({ doc: next(200), at: next(1 << 20), insert: 'w' + next(1e6).toString(36) + ' ' });
}
process.stdout.write(JSON.stringify(changes));
