// Package lazypages gives restored processes their memory while they run, in the place of criu lazy-pages.
// CRIU registers anonymous private memory with userfaultfd(2): a thread that touches a missing page sleeps
// until the Server puts it there, from a Source, in chunks of 256 KiB, each fetched once.
//
//  1. The caller writes CRIU's images but the files of pages into a directory, and calls Eager: CRIU reads
//     some pages itself (shared, locked and hugetlb memory, written pages of private file mappings, the vDSO,
//     the page a stack's pointer is on) and wants the others as holes.
//  2. Serve listens at lazy-pages.socket in CRIU's work directory. For every process CRIU sends the number of
//     its images and its userfaultfd. The Server reads pagemap-N.img, and serves faults from here on.
//  3. CRIU sends that it has finished. The Server pushes the chunks that Order names, then all others at a
//     bounded rate; faults go first. A fault brings its whole chunk, the page's neighbours first. Touched
//     tells which chunks were waited for: kept, it becomes the next restore's Order.
//  4. When a process has everything, its userfaultfd is closed. When all have, Wait returns nil.
//
// Processes fork, move, unmap and give back memory meanwhile; the kernel makes them wait until the Server has
// heard of it, and a copy at that moment fails with EAGAIN: then the news is read first. Pages given back are
// not filled again, a forked child is served like its parent, a page that the image never had is empty.
//
// The kernel gives empty pages as soon as no process holds the userfaultfd. Processes must not live to see
// that. If the Source errs, a thread has waited longer than Config.Wait, or the context ends, the Server
// kills the processes, waits until their memory is gone, calls Config.Kill, and Wait says why. If the Server
// itself dies, the process that Config.Guard starts kills the restored processes; their later children end
// with the first process of their container. A read that no thread waits for may take any time.
//
// runc 1.1 passes lazy-pages=false to CRIU, but the file that the annotation org.criu.config names comes
// after that and wins. So it takes the line "lazy-pages" in that file, the runc options CriuImagePath and
// CriuWorkPath of containerd's task, and a Server in the work path before the task starts.
package lazypages
