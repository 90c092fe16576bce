// Package lazypages gives restored processes their memory while they run.
//
// CRIU restores processes with all they had but, when it is told lazy-pages,
// without their anonymous private memory, which it registers with
// userfaultfd(2) instead: a thread that touches a missing page sleeps until
// somebody puts the page there. This package is that somebody, in the place of
// the daemon `criu lazy-pages`: it takes memory from a Source (a compressed file
// of this node or of the PoP's store) in chunks of 256 KiB, each fetched once.
//
// # One restore
//
//  1. Whoever restores writes CRIU's images but the files of pages into a
//     directory, and calls Eager: CRIU reads some pages itself (shared, locked
//     and hugetlb memory, the pages of private file mappings that were written to,
//     the vDSO, the page a stack's pointer is on) and wants the others as holes.
//  2. Serve listens at lazy-pages.socket in CRIU's work directory.
//  3. CRIU connects. For every process it sends the number that names its images,
//     and its userfaultfd. The Server reads pagemap-N.img: which pages there are,
//     which of them are lazy, and where in the file of pages they lie. From here
//     it serves faults: CRIU's own restorer may already touch memory.
//  4. CRIU sends that it has finished, and lets the processes run. Now the Server
//     pushes the chunks that Order names, and behind them all others at a bounded
//     rate, while faults go first.
//  5. When a process has everything, its userfaultfd is closed and its memory is
//     like any other. When all have, Wait returns nil.
//
// A fault brings its whole chunk, the page's neighbours first. Touched tells
// which were waited for: kept, it becomes the next restore's Order.
//
// # What processes do meanwhile
//
// They fork, move, unmap and give back memory, and the kernel makes them wait
// until the Server has heard of it. A process that does so while a page is being
// copied makes the copy fail with EAGAIN: then the news is read first. Pages
// given back are not filled again, a forked child is served like its parent, a
// page that the image never had is empty, and a process that has ended or has
// executed another program is forgotten.
//
// # When memory cannot be had
//
// The kernel gives empty pages for missing ones as soon as nobody holds the
// userfaultfd any more. Processes must not live to see that. So if the Source
// errs, if a thread has waited longer than Config.Wait, or if the context ends,
// the Server kills the processes, waits until their memory is gone, calls
// Config.Kill for what else belongs to them, and Wait says why: the container
// then boots. What nobody waits for may take any time. If the Server itself dies,
// the process that Config.Guard starts does the killing. It knows the processes
// that were restored, not their later children: those end with the first process
// of their container.
//
// # With runc and containerd
//
// runc 1.1 passes lazy-pages=false to CRIU, but lines of the configuration file
// that the annotation org.criu.config names come after that and win. So the
// recipe is: the line "lazy-pages" in that file; the runc options of containerd's
// task with CriuImagePath and CriuWorkPath, of which the shim makes
// `runc restore --image-path --work-path`; and a Server in the work path before
// the task is started. CRIU takes the socket's name relative to that directory,
// so the length of its path does not matter to it, nor to Serve.
package lazypages
