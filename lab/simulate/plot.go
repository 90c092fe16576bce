package simulate

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
)

// curve is one line of a chart.
type curve struct {
	Name   string
	X, Y   []float64
	Spread []float64 // half the height of the bar at each point, if any
	Dashed bool
}

// chart is a plot of lines.
type chart struct {
	Title, X, Y string
	LogX        bool
	YMax        float64 // 0: what the curves need
	Curves      []curve
}

const (
	chartWidth, chartHeight      = 780, 400
	plotLeft, plotTop            = 64, 40
	plotWidth, plotHeight        = 480, 300
	legendLeft, legendLineHeight = plotLeft + plotWidth + 16, 18
)

// Colours that differ in brightness too, and stand out on white and on black; text and axes follow the
// reader's theme.
var colours = []string{"#3b82f6", "#f97316", "#10b981", "#e11d48", "#a855f7", "#ca8a04", "#0891b2", "#84715e"}

const chartStyle = `<style>
svg{background:#fff;color:#222}
@media(prefers-color-scheme:dark){svg{background:#15181d;color:#ddd}}
text{fill:currentColor;font:12px sans-serif}
.title{font-size:14px}
.axis{stroke:currentColor;fill:none}
.grid{stroke:currentColor;opacity:.15}
.curve{fill:none;stroke-width:1.8}
</style>
`

// write writes the chart as SVG.
func (c chart) write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img">`+"\n", chartWidth, chartHeight)
	fmt.Fprintf(&b, "<title>%s</title>\n%s", html.EscapeString(c.Title), chartStyle)
	label(&b, plotLeft, 22, "start", "title", c.Title)
	x, y := c.scales()
	c.axes(&b, x, y)
	for i, l := range c.Curves {
		l.write(&b, x, y, i)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func label(b *strings.Builder, x, y float64, anchor, class, text string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" class="%s">%s</text>`+"\n", x, y, anchor, class,
		html.EscapeString(text))
}

// scale maps values to pixels.
type scale struct {
	from, to float64 // values at the ends
	at, size float64 // pixels
	log      bool
}

func (s scale) pixel(v float64) float64 {
	if s.log {
		return s.at + s.size*(math.Log(v)-math.Log(s.from))/(math.Log(s.to)-math.Log(s.from))
	}
	return s.at + s.size*(v-s.from)/(s.to-s.from)
}

func (c chart) scales() (x, y scale) {
	x = scale{from: math.Inf(1), to: math.Inf(-1), at: plotLeft, size: plotWidth, log: c.LogX}
	y = scale{to: c.YMax, at: plotTop + plotHeight, size: -plotHeight}
	for _, l := range c.Curves {
		for i := range l.X {
			x.from, x.to = min(x.from, l.X[i]), max(x.to, l.X[i])
			if top := l.Y[i] + l.bar(i); c.YMax == 0 {
				y.to = max(y.to, top)
			}
		}
	}
	if !(x.from < x.to) {
		x.from, x.to = 1, 2
	}
	if !(y.to > 0) {
		y.to = 1
	}
	return x, y
}

// ticks are round values between a scale's ends.
func (s scale) ticks() []float64 {
	var out []float64
	if s.log {
		for e := math.Floor(math.Log10(s.from)); e <= math.Log10(s.to); e++ {
			for _, m := range []float64{1, 2, 5} {
				if v := m * math.Pow(10, e); v >= s.from*0.999 && v <= s.to*1.001 {
					out = append(out, v)
				}
			}
		}
		return out
	}
	step := math.Pow(10, math.Floor(math.Log10(s.to-s.from)))
	for (s.to-s.from)/step < 4 {
		step /= 2
	}
	for v := math.Ceil(s.from/step) * step; v <= s.to+step/1000; v += step {
		out = append(out, v)
	}
	return out
}

func (c chart) axes(b *strings.Builder, x, y scale) {
	for _, v := range x.ticks() {
		p := x.pixel(v)
		fmt.Fprintf(b, `<line class="grid" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`+"\n", p, plotTop, p,
			plotTop+plotHeight)
		label(b, p, plotTop+plotHeight+16, "middle", "", fmt.Sprintf("%.4g", v))
	}
	for _, v := range y.ticks() {
		p := y.pixel(v)
		fmt.Fprintf(b, `<line class="grid" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/>`+"\n", plotLeft, p,
			plotLeft+plotWidth, p)
		label(b, plotLeft-6, p+4, "end", "", fmt.Sprintf("%.3g", v))
	}
	fmt.Fprintf(b, `<rect class="axis" x="%d" y="%d" width="%d" height="%d"/>`+"\n", plotLeft, plotTop,
		plotWidth, plotHeight)
	label(b, plotLeft+plotWidth/2, plotTop+plotHeight+38, "middle", "", c.X)
	fmt.Fprintf(b, `<text transform="translate(18 %d) rotate(-90)" text-anchor="middle">%s</text>`+"\n",
		plotTop+plotHeight/2, html.EscapeString(c.Y))
}

func (l curve) bar(i int) float64 {
	if l.Spread == nil {
		return 0
	}
	return l.Spread[i]
}

func (l curve) write(b *strings.Builder, x, y scale, n int) {
	style := fmt.Sprintf(`class="curve" stroke="%s"`, colours[n%len(colours)])
	bars := style + ` opacity="0.35"`
	if l.Dashed {
		style += ` stroke-dasharray="5 3"`
	}
	var points []string
	for i := range l.X {
		px := x.pixel(l.X[i])
		points = append(points, fmt.Sprintf("%.1f,%.1f", px, y.pixel(l.Y[i])))
		if s := l.bar(i); s > 0 {
			fmt.Fprintf(b, `<line %s x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`+"\n", bars, px,
				y.pixel(max(0, l.Y[i]-s)), px, y.pixel(l.Y[i]+s))
		}
	}
	fmt.Fprintf(b, `<polyline %s points="%s"/>`+"\n", style, strings.Join(points, " "))
	at := float64(plotTop + 8 + n*legendLineHeight)
	fmt.Fprintf(b, `<line %s x1="%d" y1="%.1f" x2="%d" y2="%.1f"/>`+"\n", style, legendLeft, at, legendLeft+22,
		at)
	label(b, legendLeft+28, at+4, "start", "", l.Name)
}
