package pulltrace

import (
	"fmt"
	"slices"
	"strings"
)

// What Generate writes into a trace's host and useragent fields, so that nobody takes it for a measured one.
const (
	syntheticHost  = "synthetic-"
	syntheticAgent = "synthetic/dew-simulate"
)

// Published facts of the IBM traces. The first four are of all zones together.
const (
	BlobReads  = 12_700_000 // full reads of blobs
	MeanBlob   = 14e6       // bytes, over reads
	Large      = 64 << 20   // what counts as a large blob
	LargeReads = 0.06       // share of reads that are of large blobs
	LargeBytes = 0.65       // share of bytes in these
	TopImages  = 0.10       // so many of the images …
	TopPulls   = 0.90       // … get so many of the pulls
	Days       = 75         // the traces' length
)

// Zone is an availability zone of the traces. Pulls and Bytes are the thesis's table 4.1; what is not
// published there is chosen, and says so.
type Zone struct {
	Name     string
	Pulls    int     // requests of a manifest that a pull begins with
	Bytes    float64 // of all distinct blobs
	Clients  int     // chosen: machines that pull
	Releases float64 // chosen: new versions of an image while the trace lasts, in the mean
	Bursts   float64 // chosen: chance that the next pull is of the same image
	Skew     float64 // chosen: exponent of the popularity among the popular images
}

// Zones are the thesis's, as in table 4.1. Production has many pulls of the same version; staging and
// development have few.
func Zones() []Zone {
	return []Zone{
		{Name: "fra", Pulls: 149_000, Bytes: 86e9, Clients: 400, Releases: 3, Bursts: 0.1, Skew: 0.8},
		{Name: "syd", Pulls: 55_000, Bytes: 92e9, Clients: 200, Releases: 3, Bursts: 0.1, Skew: 1.2},
		{Name: "lon", Pulls: 349_000, Bytes: 1719e9, Clients: 1000, Releases: 4, Bursts: 0.1, Skew: 1},
		{Name: "dal", Pulls: 937_000, Bytes: 6789e9, Clients: 2500, Releases: 4, Bursts: 0.1, Skew: 1.15},
		{Name: "prs", Pulls: 43_000, Bytes: 213e9, Clients: 100, Releases: 12, Bursts: 0, Skew: 0.3},
		{Name: "stg", Pulls: 301_000, Bytes: 1181e9, Clients: 600, Releases: 8, Bursts: 0, Skew: 1},
		{Name: "dev", Pulls: 22_000, Bytes: 283e9, Clients: 60, Releases: 12, Bursts: 0, Skew: 0.3},
	}
}

// ZoneNamed is the zone of that name.
func ZoneNamed(name string) (Zone, error) {
	zones := Zones()
	i := slices.IndexFunc(zones, func(z Zone) bool { return z.Name == name })
	if i < 0 {
		var names []string
		for _, z := range zones {
			names = append(names, z.Name)
		}
		return Zone{}, fmt.Errorf("no availability zone %q: there are %s", name, strings.Join(names, ", "))
	}
	return zones[i], nil
}

// scaled has so much of the pulls, the bytes and the clients.
func (z Zone) scaled(by float64) Zone {
	z.Pulls = max(1, int(float64(z.Pulls)*by+0.5))
	z.Bytes *= by
	z.Clients = max(5, int(float64(z.Clients)*by+0.5))
	return z
}

// BlobsPerPull is the same in all zones: the published reads over all pulls of table 4.1, 6.84.
func BlobsPerPull() float64 {
	pulls := 0
	for _, z := range Zones() {
		pulls += z.Pulls
	}
	return float64(BlobReads) / float64(pulls)
}
